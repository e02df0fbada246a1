"""The model: Mamba2 mixers, attention and MLPs stacked by a pattern string, and an MTP head."""
