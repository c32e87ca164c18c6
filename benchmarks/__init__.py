"""Commands that measure models, and write the tables of the docs."""

import launch as launch  # which keeps the working directory from shadowing
