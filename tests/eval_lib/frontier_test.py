"""Sweeps against plain loops, the Pareto set, the evaluator and its CSV."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import ConfigError
from eval_lib import calibration, evaluator, frontier, predictions
from eval_lib.calibration import fit_temperatures
from tests.contexts import eval_context

PARITY = dict(name='parity', length=10, train_examples=400, test_examples=300)
LAYERS = (4, 8, 12)
FLOPS = (10.0, 17.0, 25.0)


def recorded(rows=200, classes=3, seed=0):
  rng = np.random.default_rng(seed)
  labels = rng.integers(0, classes, rows)
  scale = np.array([0.5, 1.0, 2.0])[:, None, None]
  logits = rng.normal(size=(3, rows, classes)) + scale * np.eye(classes)[labels]
  return 2 * logits, labels


def leave(logits, labels, exits, layers=LAYERS, **options):
  recording = frontier.Recording(logits, labels, layers, **options)
  return recording.leave(np.array(exits))


def confident(logits, threshold, temperatures=None):
  heads = predictions.probabilities(logits, temperatures)
  return predictions.confidence_exit(heads, threshold)


def loop(logits, labels, threshold, temperatures):
  """The confidence rule and its measures, row by row: a `Point`."""
  table = []
  for row, label in enumerate(labels):
    for head in range(3):
      z = np.exp(logits[head, row] / temperatures[head])
      if max(z) / sum(z) >= threshold or head == 2:
        break
    answer, full = logits[head, row].argmax(), logits[2, row].argmax()
    left = (head == 0, head == 1, head == 2)
    cost = FLOPS[head] / FLOPS[-1]
    table.append((answer == label, LAYERS[head], cost, answer == full, *left))
  quality, depth, flops, agreement, *shares = np.mean(table, axis=0)
  return quality, depth, flops, agreement, pytest.approx(tuple(shares))


@pytest.mark.parametrize('temperatures', [None, (1.5, 0.8, 2.0)])
@pytest.mark.parametrize('threshold', [0.0, 0.6, 0.9, 1.0])
def test_confidence_sweep_equals_a_loop(threshold, temperatures):
  recording = recorded()
  scales = None if temperatures is None else np.array(temperatures)
  exits = confident(recording[0], threshold, scales)
  point = leave(*recording, exits, flops=FLOPS)
  *numbers, shares = loop(*recording, threshold, temperatures or (1.0,) * 3)
  assert point[:4] == pytest.approx(tuple(numbers))
  assert point.shares == shares


def test_flops_may_differ_from_row_to_row_and_against_another_model():
  table = np.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
  both = np.array([6.0, 56.0])
  for full_flops, expected in ((None, 33), (both, 62), (62.0, 124)):
    options = dict(flops=table, full_flops=full_flops)
    point = leave(*recorded(rows=2), [0, 2], **options)
    assert point.flops == pytest.approx(31 / expected)


def test_regression_needs_its_own_quality():
  point = leave(
    np.array([[[1.0], [2.0]], [[1.5], [2.0]]]),
    np.array([1.5, 2.5], np.float32), [0, 0], (1, 2),
    quality=lambda z, y: -float(np.square(z[:, 0] - y).mean()),
  )  # fmt: skip
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
  found = frontier.pareto(np.array(cost, float), np.array(quality, float))
  assert found.tolist() == expected


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
  context = eval_context(PARITY, jax.jit(outputs), 128, workdir)
  entry = dict(type='frontier', split='test') | entry
  return evaluator.build('tau', entry, context)


def test_evaluator_sweeps_and_writes_a_csv(tmp_path):
  built = build(tmp_path, layers=LAYERS)
  result = built.run(VARIABLES)
  logits, labels = built.heads('split', VARIABLES)
  with (tmp_path / 'frontier.csv').open(newline='') as file:
    *table, never = csv.DictReader(file)
  names = ['accuracy', 'depth', 'depth_share', 'agreement']
  expected = {'accuracy_full': 1.0}
  for threshold, row in zip(('0.8', '0.85', '0.9', '0.95'), table, strict=True):
    numbers = loop(np.float64(logits), labels, float(threshold), (1.0,) * 3)
    found = dict(zip(names, numbers, strict=False))
    found['depth_share'] = found['depth'] / LAYERS[-1]
    expected |= {f'{name}_tau_{threshold}': x for name, x in found.items()}
    shares = [f'exit_{layer}' for layer in LAYERS]
    assert list(row) == ['rule', 'value', *names, *shares]
    assert (row['rule'], row['value']) == ('confidence', threshold)
    read = {name: float(row[name]) for name in names}
    assert read == pytest.approx(found, rel=1e-5)
  for layer, head in zip(LAYERS, logits, strict=True):
    right = np.mean(head.argmax(-1) == labels)
    expected[f'accuracy_layer_{layer}'] = right
  assert result == pytest.approx(expected)
  assert [*never.values()][:5] == ['never', '', '1', '12', '1']
  assert 4.0 < result['depth_tau_0.9'] < 12.0


def test_evaluator_reports_the_main_number_of_the_task_and_sorts(tmp_path):
  built = build(tmp_path, task='qqp', thresholds=(0.9, 0.5, 0.9))
  result = built.run(VARIABLES)
  heads = {f'f1_head_{number}' for number in (1, 2, 3)}
  assert set(result) == {'f1_full'} | heads | {
    f'{name}_tau_{tau}'
    for name in ('f1', 'depth', 'depth_share', 'agreement')
    for tau in ('0.5', '0.9')
  }
  assert result['f1_full'] == 1.0
  # All leave at the first of three heads, which are counted without layers.
  assert result['depth_tau_0.5'] == 1.0
  assert result['depth_share_tau_0.5'] == pytest.approx(1 / 3)
  header = (tmp_path / 'frontier.csv').read_text().split()[0]
  assert header.startswith('rule,value,f1,depth,depth_share,agreement,')


def test_evaluator_fits_temperatures_on_another_split(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  plain = build(thresholds=(0.9,))
  scaled = build(thresholds=(0.9,), calibration_split='train')
  temperatures = fit_temperatures(*scaled.heads('calibration_split', VARIABLES))
  assert temperatures[0] > 1.2  # the first head is over-confident
  logits, labels = scaled.heads('split', VARIABLES)
  exits = confident(logits, 0.9, temperatures)
  expected = leave(logits, labels, exits, (1, 2, 3))
  depth = scaled.run(VARIABLES)['depth_tau_0.9']
  assert depth == expected.depth > plain.run(VARIABLES)['depth_tau_0.9']
  assert not list(tmp_path.iterdir())  # nothing is written without a workdir


def test_frontier_writes_the_temperatures_that_serve(tmp_path):
  built = build(tmp_path, thresholds=(0.9,), calibration_split='train')
  found = built.run(VARIABLES)['depth_tau_0.9']
  logits, labels = built.heads('split', VARIABLES)
  served = calibration.CalibrationFile(str(tmp_path)).temperatures(3)
  assert served[0] > 1.2
  exits = confident(logits, 0.9, np.array(served))
  assert found == leave(logits, labels, exits, (1, 2, 3)).depth


def test_frontier_reads_the_temperatures_that_serve(tmp_path):
  content = {'temperatures': [3.0, 1.0, 1.0], 'calibration_split': 'train'}
  content['parameters'] = calibration.fingerprint(VARIABLES)
  (tmp_path / 'calibration.json').write_text(json.dumps(content))
  for given in ({}, {'calibration_split': 'train'}):
    built = build(tmp_path, thresholds=(0.6,), **given)
    logits, labels = built.heads('split', VARIABLES)
    exits = confident(logits, 0.6, np.array([3.0, 1.0, 1.0]))
    found = built.run(VARIABLES)['depth_tau_0.6']
    assert found == leave(logits, labels, exits, (1, 2, 3)).depth
  with pytest.raises(ConfigError, match='no temperature was fitted to'):
    build(tmp_path, split='train').run(VARIABLES)
  other = {'scale': jnp.float32(0.5)}
  with pytest.raises(ConfigError, match='--evals=calibration'):
    build(tmp_path).run(other)
  build(tmp_path, calibration_split='train').run(other)
  content = json.loads((tmp_path / 'calibration.json').read_text())
  assert content['parameters'] == calibration.fingerprint(other)


def test_layers_must_fit_the_heads():
  with pytest.raises(ConfigError, match='layers: expected 3 layers'):
    build(layers=(4, 12)).run(VARIABLES)
