"""The tables of the docs are those of benchmarks/results."""

import re

import pytest

from benchmarks import tables
from core.errors import InvalidDataError

PAGES = (tables.ROOT / 'README.md', *sorted(tables.ROOT.glob('docs/*.md')))
MARKED = 'Before.\n<!-- table: one -->\n{}<!-- end -->\nAfter.\n'
TABLE = '| model | quality |\n|---|---|\n| ViT, Ti | **80.1 %** |\n| EAT | |\n'


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_no_number_of_a_table_is_typed_by_hand(page):
  text = page.read_text()
  assert tables.filled(text) == text, 'run: python -m benchmarks.tables'


def test_every_result_is_shown_or_linked_once():
  pages = '\n'.join(page.read_text() for page in PAGES)
  found = [match[2] for match in tables.REGION.finditer(pages)]
  found += re.findall(r'\]\(\.\./benchmarks/results/(\w+)\.csv\)', pages)
  assert sorted(found) == sorted(p.stem for p in tables.RESULTS.iterdir())


def test_the_command_fills_the_pages(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(tables, 'ROOT', tmp_path)
  monkeypatch.setattr(tables, 'RESULTS', tmp_path)
  (tmp_path / 'docs').mkdir()
  page, other = tmp_path / 'README.md', tmp_path / 'docs/other.md'
  page.write_text(MARKED.format('| old |\n'))
  other.write_text(MARKED.format(TABLE))
  csv = 'model,quality\n"ViT, Ti",**80.1 %**\nEAT,\n'
  (tmp_path / 'one.csv').write_text(csv)
  assert tables.main([]) == 0
  assert page.read_text() == other.read_text() == MARKED.format(TABLE)
  assert capsys.readouterr().out == 'README.md\n'


@pytest.mark.parametrize(
  ('csv', 'text'),
  [
    ('a,b\n1\n', MARKED.format('')),
    ('', MARKED.format('')),
    ('a\n', '<!-- table: one -->\n| a |\n\n<!-- end -->\n'),
    ('a\n', '<!-- table: one -->\n'),
  ],
)
def test_a_damaged_table_is_refused(csv, text, tmp_path, monkeypatch):
  monkeypatch.setattr(tables, 'RESULTS', tmp_path)
  (tmp_path / 'one.csv').write_text(csv)
  with pytest.raises(InvalidDataError, match='expected'):
    tables.filled(text)
