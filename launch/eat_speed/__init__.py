"""EAT timed against dense models: `python -m launch.benchmark eat_speed`."""
