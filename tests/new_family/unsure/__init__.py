"""Answers that say how sure they are."""
