"""Differences from the golden records that are intended, with their reasons.

One row for each: (pattern of the subject, pattern of the quantity, reason). A
row that matches no difference is out of date, and `compare.py` prints it.
"""

INTENDED: list[tuple[str, str, str]] = []
