"""Configurations of a plain ViT."""
