"""Compares two directories of golden records.

  python tests/golden/compare.py BEFORE AFTER [--lines]

prints one table: subject, quantity, largest difference, and the reason where
the difference is intended. `--lines` adds the lines of texts that differ.
"""

import argparse
import dataclasses
import difflib
import json
import math
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

if __package__:
  from tests.golden.intended import INTENDED
else:
  from intended import INTENDED

TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True)
class Row:
  """The difference of one quantity.

  Attributes:
    subject: name of the record.
    quantity: name in the record.
    difference: largest relative difference; infinite for texts, names and
      shapes that differ, and for what one side lacks.
    note: why the difference is intended, or ''.
    lines: the lines that differ, for texts.
  """

  subject: str
  quantity: str
  difference: float
  note: str = ''
  lines: tuple[str, ...] = ()

  @property
  def is_unexplained(self) -> bool:
    """Whether the difference is too large, and not intended."""
    return not self.note and not self.difference <= TOLERANCE


def compare(before: pathlib.Path, after: pathlib.Path) -> list[Row]:
  """Rows of every quantity of every record in `before`."""
  rows = []
  for path in sorted(before.glob('*.json')):
    other = after / path.name
    old = json.loads(path.read_text())
    new = json.loads(other.read_text()) if other.exists() else {}
    rows += compare_records(path.stem, old, new)
  return rows


def compare_records(subject: str, old: Any, new: Any) -> list[Row]:
  """Rows of one record."""
  old, new = (
    dict(named_lines(subject, item)) if isinstance(item, list) else item
    for item in (old, new)
  )
  rows = []
  for quantity in [*old, *(name for name in new if name not in old)]:
    given, expected = new.get(quantity), old.get(quantity)
    lines: tuple[str, ...] = ()
    largest = difference(expected, given)
    if math.isinf(largest):
      lines = tuple(text_difference(expected, given))
    note = reason(subject, quantity) if largest > TOLERANCE else ''
    rows.append(Row(subject, quantity, largest, note, lines))
  return rows


def named_lines(subject: str, items: list[Any]) -> Iterator[tuple[str, Any]]:
  """Names for the items of a list: command lines, or answers by number."""
  for number, item in enumerate(items):
    if subject == 'errors':
      yield ' '.join(item[0]) or '(none)', item[1]
    else:
      yield f'answer {number}', item


def difference(old: Any, new: Any) -> float:
  """The largest difference of numbers, relative to those above 1."""
  if isinstance(old, dict) and isinstance(new, dict):
    if set(old) != set(new):
      return math.inf
    return max((difference(old[key], new[key]) for key in old), default=0.0)
  if isinstance(old, list) and isinstance(new, list):
    if len(old) != len(new):
      return math.inf
    pairs = zip(old, new, strict=True)
    return max((difference(*pair) for pair in pairs), default=0.0)
  if isinstance(old, float) and isinstance(new, float):
    return abs(old - new) / max(1.0, abs(old)) if old != new else 0.0
  return 0.0 if old == new else math.inf


def text_difference(old: Any, new: Any) -> Iterator[str]:
  """Lines that only one of two values has."""
  for line in difflib.unified_diff(
    as_lines(old), as_lines(new), lineterm='', n=0
  ):
    if not line.startswith(('---', '+++', '@@')):
      yield line


def as_lines(value: Any) -> list[str]:
  """A value as lines of text."""
  if isinstance(value, dict):
    return [f'{key}: {json.dumps(item)}' for key, item in value.items()]
  if isinstance(value, list):
    return [item if isinstance(item, str) else json.dumps(item)
            for item in value]  # fmt: skip
  return [] if value is None else [str(value)]


def reason(subject: str, quantity: str) -> str:
  """Why a difference is intended; '' if it is not."""
  for subjects, quantities, why in INTENDED:
    if re.fullmatch(subjects, subject) and re.fullmatch(quantities, quantity):
      return why
  return ''


def out_of_date(rows: list[Row]) -> list[tuple[str, str, str]]:
  """Rows of the table of intended differences that explain none."""
  different = [row for row in rows if row.difference > TOLERANCE]
  return [
    entry
    for entry in INTENDED
    if not any(
      re.fullmatch(entry[0], row.subject)
      and re.fullmatch(entry[1], row.quantity)
      for row in different
    )
  ]


def format_rows(rows: list[Row], lines: bool = False) -> str:
  """The table; quantities of a subject that are equal share a line."""
  texts = []
  for subject in dict.fromkeys(row.subject for row in rows):
    of_subject = [row for row in rows if row.subject == subject]
    equal = [row for row in of_subject if row.difference <= TOLERANCE]
    if equal:
      largest = max(row.difference for row in equal)
      names = ', '.join(row.quantity for row in equal[:7])
      names += f' and {len(equal) - 7} more' if len(equal) > 7 else ''
      texts.append(f'{subject:28} {largest:9.1e}  {names}')
    for row in of_subject:
      if row.difference <= TOLERANCE:
        continue
      shown = 'text' if math.isinf(row.difference) else f'{row.difference:.1e}'
      note = row.note or 'UNEXPLAINED'
      texts.append(f'{subject:28} {shown:>9}  {row.quantity}: {note}')
      texts += [f'{"":40}{line}' for line in row.lines * lines]
  return '\n'.join(texts)


def main(argv: list[str]) -> int:
  """Prints the table; returns 1 if a difference is unexplained."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('before', type=pathlib.Path)
  parser.add_argument('after', type=pathlib.Path)
  parser.add_argument('--lines', action='store_true')
  arguments = parser.parse_args(argv)
  rows = compare(arguments.before, arguments.after)
  print(format_rows(rows, arguments.lines))
  for entry in out_of_date(rows):
    print('out of date:', *entry)
  unexplained = sum(row.is_unexplained for row in rows)
  print(f'{len(rows)} quantities, {unexplained} differences unexplained')
  return int(unexplained > 0)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
