"""Evaluation inside training and alone: metrics, few-shot, plots, timing."""
