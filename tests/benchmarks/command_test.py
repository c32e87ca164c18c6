"""Commands of `benchmarks`: flags, FLOP limits by hand, tiny runs of each.

No test depends on a measured time.
"""

import csv
import importlib
import re

import numpy as np
import pytest

from albert_act import compaction
from benchmarks import adatape, albert, eat_speed, peers
from eval_lib.report import Estimate
from model_lib import convert
from tests.peers import torch_and_transformers

BANKS = ('learnable', 'input')
COSTS = {'dense': 3e9, 'EAT': 1e9}


def parse(line):
  """The flags of a command line, which begins with the command."""
  name, *flags = line.split()
  return main_of(name).parse(flags)


def main_of(name):
  return importlib.import_module(f'benchmarks.{name}').main


def read(path):
  with path.open(newline='') as file:
    return list(csv.DictReader(file))


@pytest.mark.parametrize(
  ('line', 'words'),
  [
    ('adatape --variant=Q/16', "--variant: |'Q'"),
    ('adatape --bank_size=3', '--bank_size: |at least'),
    ('adatape --batch_sise=3', '--batch_sise: no such flag'),
    ('adatape --out=/no/such/folder/a.csv', '--out: |writable'),
    ('adatape --out=/etc/hosts/a.csv', '--out: |writable'),
    ('cost --rows=ViT-B/31', '--rows: |ViT-B/32|ViT-B/31'),
    ('albert --variant=huge', '--variant: |micro'),
    ('eat_speed --variant=huge', "--variant: |base|'huge'"),
    ('eat_speed --variant=tiny', '--depth: |even number above 4|got 2'),
    ('eat_speed --window=3', '--window: |even'),
    ('budgets', '--workdir'),
    ('budgets --workdir=/nowhere', '--workdir: |config.json'),
    (f'budgets --workdir=w --out={__file__}', '--out: |is a file'),
    ('adaptivity --workdir=/nowhere --out=o', '--workdir: |config.json'),
    ('eat --workdir=/nowhere --out=o', '--workdir: |config.json'),
    ('eat --workdir=w --out=o --ablation=a', "--ablation: |'a'"),
    ('eat --workdir=w --out=o --ablation=dense=x', '--ablation: |new'),
    ('input --root=/nowhere', '--root: expected a folder with 64'),
  ],
)
def test_mistakes_are_one_line(line, words, refused):
  name, *flags = line.split()
  refused(main_of(name), flags, words.split('|'))


# -- limits by hand -----------------------------------------------------------


def block(tokens, width=768, mlp_dim=3072):
  """Projections, scores and values, network: 2 for a multiply-add."""
  projections = 4 * 2 * tokens * width * width
  attention = 2 * 2 * tokens * tokens * width
  return projections + attention + 2 * 2 * tokens * width * mlp_dim


HEAD = 2 * 768 * (768 + 2)


def test_flops_of_eat_and_dense_models_by_hand():
  found = [*eat_speed.candidates(128, 1, parse('eat_speed'))]
  flops = {one.name: one.flops for one in found}
  computed = {one.name: one.columns['flops'] for one in found}
  dense = 12 * block(128) + HEAD
  assert flops['dense engine'] == dense
  assert flops['dense unrolled'] == computed['dense unrolled'] == dense
  # 1 + ceil(.7 * 127) = 90, 1 + ceil(.7 * 89) = 64
  first = 2 * block(128) + 2 * block(90) + HEAD
  last = 8 * block(64) + HEAD
  assert flops['EAT 0 %'] == pytest.approx(first + last)
  assert flops['EAT 80 %'] == pytest.approx(first + last / 5)
  # The last block computes [CLS] alone, and so does the one under the exit;
  # rows that stay compute it in full too.
  assert 11 < computed['dense engine'] / block(128) < 11.3
  limits = [dense / flops[f'EAT {rate} %'] for rate in (0, 50, 80, 95)]
  np.testing.assert_allclose(limits, [1.63, 2.24, 2.87, 3.34], atol=0.005)
  baselines = [one.name for one in found if one.is_baseline]
  assert baselines == ['dense unrolled', 'dense engine']


@pytest.mark.parametrize('rate', [0, 5, 50, 80, 95, 100])
def test_exits_are_exact_and_spread(rate):
  left = eat_speed.exits(200, rate)
  assert sum(left) == 2 * rate
  # The same share of any 20 rows in a row, up to one row.
  windows = np.convolve(left, np.ones(20), 'valid')
  assert abs(windows - rate / 5).max() <= 1
  for batch in (1, 16, 32):  # a call is whole batches, and its exits are exact
    rows = eat_speed.rows_per_call(batch, (rate,), 8)
    assert rows % batch == rows * rate % 100 == 0
    assert batch == 1 or rows >= 8 * batch


def test_missing_libraries_are_reported(monkeypatch, capsys):
  find = peers.importlib.util
  monkeypatch.setattr(find, 'find_spec', lambda name: name != 'onnx' or None)
  assert list(peers.usable(['torch', 'onnx'])) == ['torch']
  message = (
    r'left out as a peer: ONNX Runtime: onnx not.*pip install .*\[peers\]'
  )
  assert re.search(message, capsys.readouterr().out)
  monkeypatch.setattr(find, 'find_spec', lambda name: True)
  assert list(peers.usable(['onnx'], 'bfloat16')) == []
  assert 'float32' in capsys.readouterr().out


@pytest.mark.peers
def test_a_graph_for_any_batch_has_the_logits_of_pytorch(tmp_path):
  torch_and_transformers()
  flags = parse('eat_speed --variant=tiny --depth=6')
  for kind in eat_speed.TITLES['bert']:
    model = eat_speed.dense_model(flags, kind)
    weights = str(tmp_path / kind)
    convert.save_model(weights, model, eat_speed.random_params(model))
    ask = {n: peers.classifier(n, weights) for n in ('torch', 'onnx')}
    for rows, length in ((1, 9), (5, 17)):
      tokens = eat_speed.token_rows(rows, length)
      items = [{'tokens': row, 'token_types': 0 * row} for row in tokens]
      logits = ask['onnx'](items)
      np.testing.assert_allclose(logits, ask['torch'](items), 0, 1e-4)
      assert logits.std() > 0.01


def test_flops_of_adatape():
  flags = parse('adatape --variant=Ti/16 --image_size=32 --phases=forward')
  [(case, found)] = adatape.cases(flags)
  assert case == {'phase': 'forward'}
  flops = {one.name: one.flops for one in found if one.flops}
  for bank, counted in zip(('', *BANKS), flops.values(), strict=True):
    assert counted == adatape.task_of(bank, flags).model.flops((32, 32, 3))
  assert flops['ViT'] < flops['AdaTape learnable']
  readings = {one.name: one.baseline for one in found if one.baseline}
  assert readings == {f'reading {b}': f'AdaTape {b}' for b in BANKS}
  separate = parse('adatape --variant=Ti/16 --image_size=32 --tape_mlp=glu')
  model = adatape.task_of('learnable', separate).model
  assert model.flops((32, 32, 3)) > flops['AdaTape learnable']


# -- tiny runs ----------------------------------------------------------------


@pytest.mark.nightly
def test_albert(tmp_path, capsys, monkeypatch):
  # Fewer sizes compile faster.
  monkeypatch.setattr(compaction, 'SHARES', (0.5, 1.0))
  monkeypatch.setattr(compaction, 'FEW_TOKENS', (8,))
  out = tmp_path / 'rows.csv'
  flags = ['--variant=micro', '--length=12', '--batch=2', '--shares=0.5',
           '--rounds=2', '--iterations=2']  # fmt: skip
  assert albert.main([*flags, f'--out={out}']) == 0
  printed = capsys.readouterr().out
  assert 'WARNING' not in printed
  rows = read(out)
  assert [row['candidate'] for row in rows] == [
    'fixed, scanned', 'fixed, unrolled', 'masked', 'dynamic', 'engine',
    'fixed, engine',
  ]  # fmt: skip
  for row in rows:
    assert row['candidate'] in printed
    assert 0.3 < float(row['mean_share']) < 0.7
    assert float(row['depth_share']) >= float(row['mean_share'])
    is_fixed = row['candidate'].startswith('fixed')
    assert (float(row['limit']) == 1.0) == is_fixed
    assert float(row['difference']) < 1e-5


def test_the_score_gives_the_share_that_is_asked_for():
  flags = parse('albert --variant=micro --length=16')
  *_, steps = albert.prepare(2, 0.5, flags)
  assert steps.mean() / 6 == pytest.approx(0.5, abs=0.06)
  assert len(set(steps.reshape(-1).tolist())) > 2


@pytest.mark.nightly
def test_eat_speed_at_lengths(tmp_path, capsys):
  out = tmp_path / 'rows.csv'
  flags = ['--variant=tiny', '--depth=6', '--batch=2', '--rounds=2',
           '--warmup=1', '--min_seconds=0.01', '--fill=1', '--length=8,12',
           '--candidates=dense,eat', '--exit_rates=0,50']  # fmt: skip
  assert eat_speed.main([*flags, f'--out={out}']) == 0
  text = capsys.readouterr().out
  assert 'left out' not in text
  assert 'WARNING' not in text  # all dense forms compute the same
  assert 'length 8, batch 2; baseline: dense' in text
  names = ['dense unrolled', 'dense engine', 'EAT 0 %', 'EAT 50 %']
  rows = read(out)
  assert [(r['length'], r['candidate']) for r in rows] == [
    (length, name) for length in ('8', '12') for name in names
  ]
  assert all(float(row['seconds']) > 0 for row in rows)
  assert out.with_suffix('.png').exists()


def test_panels_of_lengths_by_hand():
  table = [
    {'length': n, 'batch': batch, 'candidate': name, 'flops': flops * n,
     'seconds': Estimate(n / 1e3, n / 2e3, n / 1e3)}
    for n in (16, 32) for batch in (1, 8) for name, flops in COSTS.items()
  ]  # fmt: skip
  assert eat_speed.panels(table[:4]) == []
  *timed, counted = eat_speed.panels(table)
  assert [panel.title for panel in timed] == ['Batch 1', 'Batch 8']
  for panel in timed:
    assert panel.y_label == 'ms per row'
    for line in panel.lines:
      assert (line.x.tolist(), line.y.tolist()) == ([16, 32], [16.0, 32.0])
      assert line.band[0].tolist() == [8.0, 16.0]
  lines = {line.label: line.y.tolist() for line in counted.lines}
  assert lines == {'dense': [48.0, 96.0], 'EAT': [16.0, 32.0]}
