"""Sweeps against plain loops, the Pareto set, the evaluator and its CSV."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import ConfigError
from eval_lib import calibration, frontier
from halting.row_rules import Confidence, scale
from tests.contexts import evaluator_of

PARITY = dict(name='parity', length=10, train_examples=400, test_examples=300)
LAYERS = (4, 8, 12)
FLOPS = (10.0, 17.0, 25.0)
ONES = (1.0, 1.0, 1.0)


def recorded(rows=200, classes=3):
  rng = np.random.default_rng(0)
  labels = rng.integers(0, classes, rows)
  signal = np.array([0.5, 1.0, 2.0])[:, None, None] * np.eye(classes)[labels]
  return 2 * (rng.normal(size=(3, rows, classes)) + signal), labels


def leave(recording, tau, temperatures=ONES, flops=LAYERS, layers=LAYERS):
  exits = Confidence(tau).first(scale(recording[0], temperatures))
  return frontier.Recording(*recording, layers, flops).leave(exits)


def loop(logits, labels, threshold, temperatures=ONES, flops=FLOPS):
  """The confidence rule and its measures, row by row: a `Point`."""
  table = []
  for row, label in enumerate(labels):
    for head in range(3):
      z = np.exp(logits[head, row] / temperatures[head])
      if max(z) / sum(z) >= threshold or head == 2:
        break
    answer, full = logits[head, row].argmax(), logits[2, row].argmax()
    left = (head == 0, head == 1, head == 2)
    cost = flops[head] / flops[-1]
    table.append((answer == label, LAYERS[head], cost, answer == full, *left))
  return np.mean(table, axis=0)


@pytest.mark.parametrize('temperatures', [ONES, (1.5, 0.8, 2.0)])
@pytest.mark.parametrize('threshold', [0.0, 0.6, 0.9, 1.0])
def test_confidence_sweep_equals_a_loop(threshold, temperatures):
  point = leave(recorded(), threshold, temperatures, FLOPS)
  expected = loop(*recorded(), threshold, temperatures)
  assert (*point[:4], *point.shares) == pytest.approx(tuple(expected))


@pytest.mark.parametrize(
  ('full_flops', 'expected'),
  [(None, 33), (np.array([6.0, 56.0]), 62), (62.0, 124)],
)
def test_flops_may_differ_from_row_to_row(full_flops, expected):
  table = np.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
  recording = frontier.Recording(*recorded(2), LAYERS, table, full_flops)
  point = recording.leave(np.array([0, 2]))
  assert point.flops == pytest.approx(31 / expected)


def test_regression_needs_its_own_quality():
  recording = frontier.Recording(
    np.array([[[1.0], [2.0]], [[1.5], [2.0]]]),
    np.array([1.5, 2.5], np.float32), (1, 2), (1, 2),
    quality=lambda z, y: -float(np.square(z[:, 0] - y).mean()),
  )  # fmt: skip
  point = recording.leave(np.array([0, 0]))
  assert point.quality == pytest.approx(-0.25)
  assert point.agreement == pytest.approx(1)  # correlated


@pytest.mark.parametrize(
  ('cost', 'quality', 'expected'),
  [
    ((1, 2, 2, 3, 3, 4, np.nan), (0.5, 0.7, 0.6, 0.7, 0.9, 0.8, 1.0),
     [True, True, False, False, True, False, False]),
    ((1, 1), (1, 1), [True, True]),
    ((), (), []),
  ],
)  # fmt: skip
def test_pareto_by_hand(cost, quality, expected):
  on_front = frontier.pareto(np.array(cost, float), np.array(quality, float))
  assert on_front.tolist() == expected


def outputs(variables, batch):
  """Three heads of which later ones have seen more of the sequence."""
  tokens, margins = batch['tokens'], []
  for head, seen in enumerate((8, 9, 10)):
    is_odd = (tokens[:, :seen] == 0).sum(1) % 2 > 0
    # Confidences of 0.62, 0.85 and 0.95 by a token of no importance.
    margin = 0.25 + 0.6 * tokens[:, head].astype(jnp.float32)
    margins.append(jnp.where(is_odd, -margin, margin))
  margins = jnp.stack(margins, 1) * variables['scale']
  return {'logits': jnp.stack([margins, -margins], 2)}


VARIABLES = {'scale': jnp.float32(1.0)}


def build(workdir='', **entry):
  context = dict(outputs=jax.jit(outputs), workdir=workdir, batch_size=128)
  entry = dict(split='test') | entry
  return evaluator_of('frontier', PARITY, context, **entry)


def test_evaluator_sweeps_and_writes_a_csv(tmp_path):
  built = build(tmp_path, layers=LAYERS)
  result = built.run(VARIABLES)
  logits, labels = built.heads('split', VARIABLES)
  with (tmp_path / 'frontier.csv').open(newline='') as file:
    *table, never = csv.DictReader(file)
  names = ['accuracy', 'depth', 'depth_share', 'agreement']
  expected = {'accuracy_full': 1.0}
  for threshold, row in zip(('0.8', '0.85', '0.9', '0.95'), table, strict=True):
    numbers = loop(np.float64(logits), labels, float(threshold), flops=LAYERS)
    measures = dict(zip(names, numbers, strict=False))
    expected |= {f'{name}_tau_{threshold}': x for name, x in measures.items()}
    shares = [f'exit_{layer}' for layer in LAYERS]
    assert list(row) == ['rule', 'value', *names, *shares]
    assert (row['rule'], row['value']) == ('confidence', threshold)
    read = {name: float(row[name]) for name in names}
    assert read == pytest.approx(measures, rel=1e-5)
  for layer, head in zip(LAYERS, logits, strict=True):
    right = np.mean(head.argmax(-1) == labels)
    expected[f'accuracy_layer_{layer}'] = right
  assert result == pytest.approx(expected)
  assert [*never.values()][:5] == ['never', '', '1', '12', '1']
  assert 4.0 < result['depth_tau_0.9'] < 12.0


def depth(built, temperatures, tau=0.9):
  """The depth of the evaluator's rows, by the rule that serves."""
  recording = built.heads('split', VARIABLES)
  return leave(recording, tau, temperatures, layers=(1, 2, 3)).depth


def test_frontier_fits_and_writes_the_temperatures_that_serve(tmp_path):
  built = build(tmp_path, thresholds=(0.9,), calibration_split='train')
  plain = build(thresholds=(0.9,)).run(VARIABLES)
  result = built.run(VARIABLES)
  served = calibration.CalibrationFile(str(tmp_path)).temperatures(3)
  assert served[0] > 1.2  # the first head is over-confident
  fitted = built.heads('calibration_split', VARIABLES)
  assert [*served] == calibration.fit_temperatures(*fitted).tolist()
  assert result['depth_tau_0.9'] == depth(built, served)
  assert result['depth_tau_0.9'] > plain['depth_tau_0.9']


def test_frontier_reads_the_temperatures_that_serve(tmp_path):
  content = {'temperatures': [3.0, 1.0, 1.0], 'calibration_split': 'train'}
  content['parameters'] = calibration.fingerprint(VARIABLES)
  path = tmp_path / 'calibration.json'
  path.write_text(json.dumps(content))
  for entry in ({}, {'calibration_split': 'train'}):
    built = build(tmp_path, thresholds=(0.6,), **entry)
    result = built.run(VARIABLES)['depth_tau_0.6']
    assert result == depth(built, [3.0, 1.0, 1.0], 0.6)
  with pytest.raises(ConfigError, match='no temperature was fitted to'):
    build(tmp_path, split='train').run(VARIABLES)
  other = {'scale': jnp.float32(0.5)}
  with pytest.raises(ConfigError, match='--evals=calibration'):
    build(tmp_path).run(other)
  build(tmp_path, calibration_split='train').run(other)
  content = json.loads(path.read_text())
  assert content['parameters'] == calibration.fingerprint(other)
