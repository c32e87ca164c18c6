"""One file per experiment; run them with `python -m launch.train`."""
