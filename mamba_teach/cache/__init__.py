"""Who owns which block: specs, the pool, and the tables of every request. No torch in here."""
