"""Texts of a corpus, prepared once as rows of token ids."""
