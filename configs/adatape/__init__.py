"""Experiments of AdaTape and the models it is compared with."""
