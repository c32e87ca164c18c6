"""Transformer building blocks, halting and FLOP counts."""
