"""A trained EAT measured: `python -m launch.benchmark eat`."""
