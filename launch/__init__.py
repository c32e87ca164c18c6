"""Command lines; run them from the checkout, `python -m launch.train`."""
