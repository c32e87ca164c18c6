"""ALBERT whose tokens halt: pretraining, fine-tuning, analysis, serving."""
