"""Compares two directories of golden records.

  python tests/golden/compare.py BEFORE AFTER

prints one table: subject, largest difference, quantity, and the reason where
the difference is intended.
"""

import argparse
import functools
import json
import math
import pathlib
import re
import sys
from typing import Any, NamedTuple

if __package__:
  from tests.golden.intended import INTENDED
else:
  from intended import INTENDED

# On a CPU like that of the records, which has AVX2 and no AVX-512. Others round
# in another way, and training enlarges it: on one with AVX-512 the program that
# made the records (8f099ee) differs from them by up to 1.6e-5, and this one is
# bit for bit as that one. There the bound is that of models in float32.
TOLERANCE, OTHER_CPU = 1e-6, 1e-4


@functools.cache
def limit() -> float:
  """The largest difference that rounding explains on this CPU."""
  info = pathlib.Path('/proc/cpuinfo')
  features = info.read_text().split() if info.is_file() else []
  is_like = 'avx2' in features and 'avx512f' not in features
  return TOLERANCE if is_like else OTHER_CPU


class Row(NamedTuple):
  """The difference of one quantity of a record."""

  subject: str
  quantity: str
  difference: float  # largest, relative; infinite for names and shapes
  note: str = ''  # why it is intended

  @property
  def is_unexplained(self) -> bool:
    """Whether the difference is too large, and not intended."""
    return not self.note and not self.difference <= limit()


def compare(before: pathlib.Path, after: pathlib.Path) -> list[Row]:
  """Rows of every quantity of every record in `before`."""
  rows = []
  for path in sorted(before.glob('*.json')):
    other = after / path.name
    new = json.loads(other.read_text()) if other.exists() else {}
    rows += compare_records(path.stem, json.loads(path.read_text()), new)
  return rows


def compare_records(subject: str, old: Any, new: Any) -> list[Row]:
  """Rows of one record."""
  rows = []
  for quantity in dict.fromkeys([*old, *new]):
    expected, given = old.get(quantity), new.get(quantity)
    largest = difference(expected, given)
    note = reason(subject, quantity) if largest > TOLERANCE else ''
    rows.append(Row(subject, quantity, largest, note))
  return rows


def difference(old: Any, new: Any) -> float:
  """The largest difference of numbers, relative to those above 1."""
  if type(old) is not type(new):
    return math.inf
  if isinstance(old, dict):
    same, pairs = old.keys() == new.keys(), ((old[k], new.get(k)) for k in old)
  elif isinstance(old, list):
    same, pairs = len(old) == len(new), zip(old, new, strict=False)
  elif isinstance(old, float):
    return abs(old - new) / max(1.0, abs(old)) if old != new else 0.0
  else:
    return 0.0 if old == new else math.inf
  if not same:
    return math.inf
  return max((difference(*pair) for pair in pairs), default=0.0)


def explains(entry: tuple[str, str, str], subject: str, quantity: str) -> bool:
  """Whether a row of `INTENDED` is about a quantity."""
  names = zip(entry, (subject, quantity), strict=False)
  return all(re.fullmatch(pattern, name) for pattern, name in names)


def reason(subject: str, quantity: str) -> str:
  """Why a difference is intended; '' if it is not."""
  found = (row[2] for row in INTENDED if explains(row, subject, quantity))
  return next(found, '')


def out_of_date(rows: list[Row]) -> list[tuple[str, str, str]]:
  """Rows of the table of intended differences that explain none."""
  different = [row for row in rows if row.difference > TOLERANCE]
  return [
    entry
    for entry in INTENDED
    if not any(explains(entry, row.subject, row.quantity) for row in different)
  ]


def format_rows(rows: list[Row]) -> str:
  """The table of what differs."""
  return '\n'.join(
    f'{row.subject:28} {row.difference:9.1e}  {row.quantity}: '
    f'{row.note or "UNEXPLAINED"}'
    for row in rows
    if not row.difference <= limit()
  )


def main(argv: list[str]) -> int:
  """Prints the table; returns 1 if a difference is unexplained."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('before', type=pathlib.Path)
  parser.add_argument('after', type=pathlib.Path)
  arguments = parser.parse_args(argv)
  rows = compare(arguments.before, arguments.after)
  print(format_rows(rows))
  for entry in out_of_date(rows):
    print('out of date:', *entry)
  unexplained = sum(row.is_unexplained for row in rows)
  print(f'{len(rows)} quantities, {unexplained} differences unexplained')
  return int(unexplained > 0)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
