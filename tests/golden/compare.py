"""Compares two directories of golden records.

  python tests/golden/compare.py BEFORE AFTER

prints a table with a row of each kind of quantity, then every quantity whose
difference rounding does not explain.
"""

import functools
import json
import math
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

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


def compare(before: pathlib.Path, after: pathlib.Path) -> dict[str, float]:
  """The largest relative difference of each quantity; infinite for names."""
  rows = {}
  for name in sorted({p.name for p in (*before.iterdir(), *after.iterdir())}):
    paths = before / name, after / name
    texts = [p.read_text() if p.exists() else '{}' for p in paths]
    found = differences(*map(json.loads, texts))
    rows |= {f'{k}, {name.removesuffix(".json")}': v for k, v in found.items()}
  return rows


def differences(old: Any, new: Any) -> dict[str, float]:
  """Those of the quantities of two records."""
  before, after = dict(quantities(old)), dict(quantities(new))
  names = dict.fromkeys([*before, *after])
  return {name: difference(before.get(name), after.get(name)) for name in names}


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


def unexplained(rows: dict[str, float]) -> dict[str, float]:
  """The differences above the limit."""
  return {name: by for name, by in rows.items() if not by <= limit()}


def main(before: str, after: str) -> int:
  """Prints the table; returns 1 if a quantity differs."""
  rows, kinds = compare(pathlib.Path(before), pathlib.Path(after)), {}
  for name, by in rows.items():
    kinds.setdefault(name.partition(':')[0].partition(',')[0], {})[name] = by
  print(f'{"kind":16} {"compared":>8} {"differ":>8} {"largest":>9}  where')
  for kind, some in kinds.items():
    worst, count = max(some, key=some.get), len(unexplained(some))
    print(f'{kind:16} {len(some):8} {count:8} {some[worst]:9.1e}  {worst}')
  different = unexplained(rows)
  print(*(f'{by:9.1e}  {name}' for name, by in different.items()), sep='\n')
  return int(bool(different))


if __name__ == '__main__':
  sys.exit(main(*sys.argv[1:]))
