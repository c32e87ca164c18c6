"""The benchmark runs on tiny models; no test depends on a measured time."""

import csv
import re

import pytest

from eval_lib.timing import Estimate
from launch import adatape_benchmark, benchmark

TINY = adatape_benchmark.Settings(
  model=dict(width=16, depth=2, mlp_dim=32, num_heads=2, patch_size=8),
  tape=dict(
    bank_size=20,
    bank_patch_size=4,
    tokens_per_step=2,
    max_steps=3,
    query_dim=8,
  ),
  image_size=16,
  num_classes=5,
  batch_size=2,
  repeats=2,
  warmup=1,
)


def row(what, phase='forward', flops=None, limit=None):
  seconds = Estimate(12.345, 10.002, 20.008)
  ratio = Estimate(0.95, 0.9, 1.0)
  return adatape_benchmark.Row(phase, what, seconds, ratio, flops, limit)


@pytest.fixture
def rows():
  models = [('ViT', 2e9, 1.0), ('AdaTape learnable', 4e9, 0.5)]
  return [
    *(row(name, 'forward', *cost) for name, *cost in models),
    row('reading learnable'),
    *(row(name, 'train step', *cost) for name, *cost in models),
  ]


@pytest.mark.slow
def test_tiny_run():
  rows = adatape_benchmark.run(TINY)
  names = [(row.phase, row.what) for row in rows]
  models = ['ViT', 'AdaTape learnable', 'AdaTape input']
  readings = ['reading learnable', 'reading input']
  assert names == [('forward', name) for name in models + readings] + [
    ('train step', name) for name in models
  ]
  built = adatape_benchmark.build_models(TINY)
  cost = {name: model.flops((16, 16, 3)) for name, model in built.items()}
  for row in rows:
    if row.what in cost:
      assert row.flops == cost[row.what]
      assert row.flop_limit == cost['ViT'] / cost[row.what]
    else:
      assert row.flops is row.flop_limit is None
    if row.what == 'ViT':
      assert row.ratio == Estimate(1.0, 1.0, 1.0)
  assert all(row.flop_limit < 1 for row in rows if 'AdaTape' in row.what)


@pytest.mark.slow
def test_a_timed_train_step_trains():
  models = adatape_benchmark.build_models(TINY)
  models = {'ViT': models['ViT']}
  (call,) = adatape_benchmark.train_functions(TINY, models).values()
  losses = [call()[1]['loss'].compute() for _ in range(20)]
  assert losses[-1] < losses[0]


def test_csv_reads_back(rows, tmp_path):
  path = tmp_path / 'rows.csv'
  benchmark.write_csv(rows, str(path), dict(variant='tiny', batch_size=2))
  with path.open(newline='') as file:
    read = list(csv.DictReader(file))
  assert len(read) == len(rows)
  for line, row in zip(read, rows, strict=True):
    assert line['what'] == row.what
    assert line['variant'] == 'tiny'
    assert float(line['seconds']) == row.seconds.median
    assert float(line['ratio_high']) == row.ratio.high
    assert line['flops'] == ('' if row.flops is None else str(row.flops))


def test_tables_fit_a_terminal(rows, capsys):
  benchmark.print_rows(rows, 'title [a]')
  text = capsys.readouterr().out
  for cell in (
    'forward',
    'train step',
    'AdaTape learnable',
    '12345 [10002, 20008]',
    '4.00',
    '0.950 [0.900, 1.000]',
    '0.500',
    '95.0 [90.0, 100.0]',
  ):
    assert cell in text
  assert 'title [a]' in text
  assert '…' not in text


@pytest.mark.parametrize(
  ('argv', 'message'),
  [
    ([], 'command'),
    (['adatap'], 'adatape'),
    (['adatape', '--variant=Q/16'], "--variant: .*'Q/16'"),
    (['adatape', '--bank_size=3'], '--bank_size: .*at least'),
    (['adatape', '--repeats=0'], '--repeats: .*positive integer'),
    (['adatape', '--batch_sise=3'], '--batch_sise: no such flag'),
    (['adatape', '--out=/no/such/folder/a.csv'], '--out: .*exists'),
  ],
)
def test_mistakes_are_one_line(argv, message, capsys):
  with pytest.raises(SystemExit) as caught:
    benchmark.main(argv)
  assert caught.value.code == 2
  text = capsys.readouterr().err
  assert text.count('\n') == 1
  assert re.search(message, text)
