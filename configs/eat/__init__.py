"""Experiments with EAT on GLUE."""
