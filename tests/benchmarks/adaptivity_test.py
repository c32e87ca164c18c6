"""Cost against difficulty: numbers by hand, and a run of a tiny ALBERT."""

import json
import types

import ml_collections
import numpy as np
import pytest

from benchmarks import adaptivity
from dataset_lib import builder, tokenizer
from tests.albert_act import tiny_run
from tests.benchmarks.command_test import read

# Confidences of 0.9, 0.6 and 0.8 at the first of two heads `[N, E, C]`.
LOGITS = np.log([
  [[0.9, 0.1], [0.3, 0.7]],
  [[0.4, 0.6], [0.3, 0.7]],
  [[0.2, 0.8], [0.3, 0.7]],
]).astype(np.float32)  # fmt: skip
FLOPS = np.array([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0]])


def spent(workdir, **rows):
  task = types.SimpleNamespace(head_layers=(2, 4))
  saved = types.SimpleNamespace(step=1)
  found = types.SimpleNamespace(saved=saved, task=task, variables={})
  flags = types.SimpleNamespace(workdir=str(workdir), tau=0.75)
  return adaptivity.spent(
    {'logits': LOGITS, 'flops': FLOPS} | rows, found, flags
  )


def test_rows_leave_at_the_first_confident_head(tmp_path):
  costs, answers = spent(tmp_path)
  assert {k: one.tolist() for k, one in costs.items()} == {
    'flops': [1, 6, 3], 'depth': [2, 4, 2]
  }  # fmt: skip
  np.testing.assert_array_equal(answers, LOGITS[range(3), [0, 1, 0]])
  # T = 4 turns 0.9 into 0.63.
  text = json.dumps({'temperatures': [4.0, 1.0]})
  (tmp_path / 'calibration.json').write_text(text)
  assert spent(tmp_path)[0]['flops'].tolist() == [5, 6, 7]


def test_a_regression_and_one_head_run_to_the_end(tmp_path):
  costs, answers = spent(tmp_path, logits=LOGITS[..., :1])
  assert costs['flops'].tolist() == [5, 6, 7]
  np.testing.assert_array_equal(answers, LOGITS[:, 1, :1])
  steps = np.array([4, 5, 6])
  one = dict(logits=LOGITS[:, :1], flops=FLOPS[:, 0], steps=steps)
  rows = one | {'label': steps, 'kept': FLOPS, 'full_flops': steps}
  costs, _ = spent(tmp_path, **rows)
  assert {*costs} == {'flops', 'steps'}
  assert costs['flops'].tolist() == [1, 2, 3]


def test_correlations_and_extremes_by_hand():
  cost = {'flops': np.array([1.0, 2.0, 9.0, 3.0]), 'depth': np.full(4, 2)}
  hard = {'length': np.array([10, 20, 40, 30])}
  first, second = adaptivity.correlations(cost, hard)
  assert first == dict(cost='flops', mean_cost=3.75, length=pytest.approx(1))
  assert second['length'] == 0
  least, most = 'cheapest', 'most expensive'
  pairs = [(least, 0), (least, 1), (most, 2), (most, 3)]
  assert adaptivity.extremes(cost['flops']) == pairs
  assert adaptivity.extremes(cost['flops'], 1) == pairs[::2]
  assert adaptivity.extremes(np.ones(3)) == [(least, 0), (most, 2)]


@pytest.mark.parametrize('length', [3, 1 + adaptivity.NUMBERS])
def test_few_numbers_are_shown_as_a_text(length):
  data = dict(name='recurrent_act.data:Graves', task='parity', length=length)
  config = ml_collections.ConfigDict({'dataset': data})
  source = builder.build_source(config.dataset, 'test')
  text = adaptivity.reader(config, types.SimpleNamespace(source=source))(5)
  numbers = [f'{x:.0f}' for x in source.record(5)['inputs'][0]]
  assert text == (' '.join(numbers) if length == 3 else None)


@pytest.mark.nightly
def test_an_albert_and_its_texts(tmp_path_factory, tmp_path, capsys, refused):
  run = tiny_run.made(tmp_path_factory, 'glue')
  fixed = tiny_run.made(tmp_path_factory, 'glue', 'fixed')
  flags = [f'--workdir={run}', '--split=validation', '--rows=30']
  given = [*flags, f'--dense={fixed}', f'--out={tmp_path}']
  assert adaptivity.main(given) == 0
  printed = capsys.readouterr().out
  table = {row['cost']: row for row in read(tmp_path / 'correlations.csv')}
  assert {*table} == {'flops', 'iterations', 'depth'}
  for column in ('length', 'entropy_dense'):
    # FLOPs are linear in the iterations.
    pair = [float(table[name][column]) for name in ('flops', 'iterations')]
    assert pair[0] == pytest.approx(pair[1])
  rows = read(tmp_path / 'examples.csv')
  kinds = ['cheapest'] * 10 + ['most expensive'] * 10
  assert [row['kind'] for row in rows] == kinds
  costs = [float(row['flops']) for row in rows]
  assert costs == sorted(costs[:10]) + sorted(costs[10:])[::-1]
  assert costs[9] <= costs[-1]
  words = tokenizer.load(run / 'tokenizer.json')
  for row in rows:
    length = int(float(row['length']))
    assert len(words.encode([row['text']]).tokens) >= length
    assert row['text'][: adaptivity.SHOWN] in printed
  assert (tmp_path / 'adaptivity.png').exists()
  pretrained = tiny_run.made(tmp_path_factory, 'pretrain')
  refused(adaptivity.main, [*given, f'--dense={pretrained}'], ['--dense'])
  refused(adaptivity.main, [*given, '--split=nowhere'], ['--split'])
