"""CSV files and terminal tables, against values by hand."""

import csv

import numpy as np
import pytest

from eval_lib import report
from eval_lib.report import Estimate


def test_estimate_by_hand():
  estimate = Estimate.of(np.array([5.0, 1.0, 2.0, 3.0, 4.0]))
  assert estimate == Estimate(median=3.0, low=2.0, high=4.0)
  assert estimate.text() == '3.00 [2.00, 4.00]'
  assert estimate.text(scale=1000.0) == '3000 [2000, 4000]'
  assert estimate.text(scale=0.001) == '0.00300 [0.00200, 0.00400]'


def test_csv_reads_back(tmp_path):
  path = tmp_path / 'rows.csv'
  rows = [
    {'candidate': 'ViT, "B"', 'seconds': Estimate(1.5, 1.0, 2.0)},
    {'candidate': 'AdaTape', 'limit': 0.95, 'flops': None},
  ]
  report.write_csv(path, rows, {'variant': 'Ti/16'})
  assert path.read_text().splitlines()[0] == (
    'candidate,seconds,seconds_low,seconds_high,limit,flops,variant'
  )
  with path.open(newline='') as file:
    first, second = csv.DictReader(file)
  assert first == dict(
    candidate='ViT, "B"', seconds='1.5', seconds_low='1.0', seconds_high='2.0',
    variant='Ti/16', limit='', flops='',
  )  # fmt: skip
  assert (second['limit'], second['seconds']) == ('0.95', '')
  report.write_csv(path, [{'a': 1}])
  assert path.read_text() == 'a\n1\n'
  assert [one.name for one in tmp_path.iterdir()] == ['rows.csv']


@pytest.mark.parametrize('columns', ['30', '200'])
def test_tables_are_never_cut_off(columns, capsys, monkeypatch):
  monkeypatch.setenv('COLUMNS', columns)
  long = 'a long name of a candidate [with brackets] ' * 2
  rows = [
    {'name': long, 'seconds': Estimate(0.012345, 0.01, 0.02), 'hidden': 5},
    {'name': 'other', 'empty': None, 'quality': 0.5, 'rows': 3},
  ]
  names = ('name', 'seconds', 'empty', 'quality', 'rows')
  report.print_table('a title [b]', rows, 'a note [c]', names)
  text = capsys.readouterr().out
  cells = (long.strip(), '12.3 [10.0, 20.0]', 'a title [b]', 'a note [c]')
  for cell in (*cells, 'ms', 'quality %', '50.0', 'rows', ' 3'):
    assert cell in text
  for word in ('…', 'hidden', 'empty', 'None'):
    assert word not in text
  report.print_table('', [{'as it is': 0.25, 'other': None}])
  assert '0.25' in capsys.readouterr().out
