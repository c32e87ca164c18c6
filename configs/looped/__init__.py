"""Configurations of recursive reasoners."""
