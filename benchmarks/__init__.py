"""Commands that measure models, and write the tables of the docs."""
