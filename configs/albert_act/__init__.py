"""Configurations of adaptive-depth ALBERT."""
