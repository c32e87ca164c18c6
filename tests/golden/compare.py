"""Compares two directories of golden records.

  python tests/golden/compare.py BEFORE AFTER

prints a table with a row of each kind of quantity, then every quantity whose
difference rounding does not explain.
"""

import collections
import functools
import json
import math
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

# On a CPU like that of the records, which has AVX-512. Others round in another
# way, and training enlarges it, by up to 1.6e-5. There the bound is that of
# models in float32.
TOLERANCE, OTHER_CPU = 1e-6, 1e-4


@functools.cache
def limit() -> float:
  """The largest difference that rounding explains on this CPU."""
  info = pathlib.Path('/proc/cpuinfo')
  features = info.read_text().split() if info.is_file() else []
  return TOLERANCE if 'avx512f' in features else OTHER_CPU


class Row(NamedTuple):
  """The difference of one quantity of a record."""

  subject: str
  quantity: str  # its kind, and names within it
  difference: float  # largest, relative; infinite for names and shapes

  @property
  def is_different(self) -> bool:
    return not self.difference <= limit()


def compare(before: pathlib.Path, after: pathlib.Path) -> list[Row]:
  names = {p.name for root in (before, after) for p in root.glob('*.json')}
  rows = []
  for name in sorted(names):
    paths = before / name, after / name
    records = [json.loads(p.read_text()) if p.exists() else {} for p in paths]
    rows += compare_records(name.removesuffix('.json'), *records)
  return rows


def compare_records(subject: str, old: Any, new: Any) -> list[Row]:
  before, after = dict(quantities(old)), dict(quantities(new))
  return [
    Row(subject, name, difference(before.get(name), after.get(name)))
    for name in dict.fromkeys([*before, *after])
  ]


def quantities(record: Any, name: str = '') -> Iterator[tuple[str, Any]]:
  """Names and values of a record, without its dicts."""
  for key, value in record.items():
    if isinstance(value, dict):
      yield from quantities(value, f'{name}{key}: ')
    else:
      yield f'{name}{key}', value


def difference(old: Any, new: Any) -> float:
  """The largest difference of numbers, relative to those above 1."""
  if type(old) is not type(new):
    return math.inf
  if isinstance(old, list) and len(old) == len(new):
    return max(map(difference, old, new), default=0.0)
  if isinstance(old, float) and old != new:
    if math.isnan(old) and math.isnan(new):  # the mean of nothing
      return 0.0
    return abs(old - new) / max(1.0, abs(old))
  return 0.0 if old == new else math.inf


def format_kinds(rows: list[Row]) -> str:
  """The table of the kinds of quantities: the largest difference of each."""
  kinds = collections.defaultdict(list)
  for row in rows:
    kinds[row.quantity.partition(':')[0]].append(row)
  lines = [f'{"kind":16} {"compared":>8} {"differ":>8} {"largest":>9}  where']
  for kind, some in kinds.items():
    worst = max(some, key=lambda row: row.difference)
    differ = sum(row.is_different for row in some)
    where = f'{worst.subject}, {worst.quantity}' if worst.difference else ''
    lines.append(
      f'{kind:16} {len(some):8} {differ:8} {worst.difference:9.1e}  {where}'
    )
  return '\n'.join(lines)


def format_rows(rows: list[Row]) -> str:
  return '\n'.join(
    f'{row.subject:28} {row.difference:9.1e}  {row.quantity}'
    for row in rows
    if row.is_different
  )


def main(before: str, after: str) -> int:
  """Prints the table; returns 1 if a quantity differs."""
  rows = compare(pathlib.Path(before), pathlib.Path(after))
  different = format_rows(rows)
  print(format_kinds(rows), different, sep='\n')
  return int(bool(different))


if __name__ == '__main__':
  sys.exit(main(*sys.argv[1:]))
