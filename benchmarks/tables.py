"""Writes the tables of the docs from benchmarks/results.

  python -m benchmarks.tables

In README.md and docs/*.md a table is between lines `<!-- table: NAME -->` and
`<!-- end -->`; its rows come from results/NAME.csv, the titles first.
"""

import csv
import dataclasses
import pathlib
import re
from typing import Any

from core import files
from core.errors import InvalidDataError
from launch import command_line

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks' / 'results'
START, END = '<!-- table: ', '<!-- end -->'
REGION = re.compile(rf'^({START}(\w+) -->\n)(?:\|.*\n)*(?={END}$)', re.M)


@dataclasses.dataclass(frozen=True)
class Flags:
  """No flags."""


def table(path: pathlib.Path) -> str:
  """Returns a CSV file as a table in Markdown."""
  with path.open(newline='', encoding='utf-8') as file:
    rows = list(csv.reader(file, strict=True))
  if len(counts := {*map(len, rows)}) != 1:
    raise InvalidDataError(
      f'{path}: expected lines of one length, got {counts}'
    )
  cells = [[f' {cell} |' if cell else ' |' for cell in row] for row in rows]
  cells.insert(1, ['---|'] * len(rows[0]))
  return ''.join(f'|{"".join(row)}\n' for row in cells)


def filled(text: str) -> str:
  """Returns a page with its tables filled again."""
  text, count = REGION.subn(
    lambda match: match[1] + table(RESULTS / f'{match[2]}.csv'), text
  )
  if count != text.count(START):
    starts = f'{text.count(START)} lines {START!r}'
    raise InvalidDataError(f'expected {starts}, each with {END!r}, got {count}')
  return text


def run(flags: Any) -> None:
  """Writes the pages whose tables have changed, and prints their names."""
  for page in (ROOT / 'README.md', *sorted(ROOT.glob('docs/*.md'))):
    before = page.read_text(encoding='utf-8')
    if (after := filled(before)) != before:
      files.write_text(page, after)
      print(page.relative_to(ROOT))


main = command_line.Command('tables', __doc__, Flags, run, 'benchmarks')

if __name__ == '__main__':
  raise SystemExit(main())
