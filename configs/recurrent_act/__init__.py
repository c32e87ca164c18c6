"""Experiments of recurrent_act: the tasks of Graves (2016)."""
