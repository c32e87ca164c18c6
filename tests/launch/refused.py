"""Rows of refused.txt: wrong command lines, and words of their answers."""

import pathlib

# (arguments, words) of each row, by section.
TABLE: dict[str, list[tuple[str, list[str]]]] = {}
for line in pathlib.Path(__file__).with_suffix('.txt').read_text().splitlines():
  if line.startswith('['):
    rows = TABLE.setdefault(line[1:-1], [])
  elif '=> ' in line:
    arguments, _, words = line.partition('=> ')
    rows.append((arguments.rstrip(' '), words.split()))
