"""Pictures of the engine, drawn from the event log. Nothing that runs knows of them."""
