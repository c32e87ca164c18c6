"""Transformer building blocks and FLOP counts."""
