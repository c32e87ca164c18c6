"""Recursive reasoners: a small net applied until a puzzle is solved."""
