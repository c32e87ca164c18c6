"""Sweeps against plain loops, the Pareto set, the evaluator and its CSV."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataset_lib.errors import ConfigError
from eval_lib import evaluator, frontier
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


def loop(logits, labels, threshold, temperatures):
  """The confidence rule and its measures, row by row."""
  right = depth = spent = agree = 0
  shares = [0, 0, 0]
  for row, label in enumerate(labels):
    for head in range(3):
      z = np.exp(logits[head, row] / temperatures[head])
      if max(z) / sum(z) >= threshold or head == 2:
        break
    answer = logits[head, row].argmax()
    right += answer == label
    agree += answer == logits[2, row].argmax()
    depth += LAYERS[head]
    spent += FLOPS[head]
    shares[head] += 1
  n = len(labels)
  return (
    right / n,
    depth / n,
    spent / (n * FLOPS[-1]),
    agree / n,
    *(share / n for share in shares),
  )


@pytest.mark.parametrize('temperatures', [None, (1.5, 0.8, 2.0)])
@pytest.mark.parametrize('threshold', [0.0, 0.6, 0.9, 1.0])
def test_confidence_sweep_equals_a_loop(threshold, temperatures):
  logits, labels = recorded()
  scales = None if temperatures is None else np.array(temperatures)
  setting = frontier.confidence(threshold, scales)
  [point] = frontier.sweep(
    logits, labels, [setting], layers=LAYERS, flops=FLOPS
  )
  expected = loop(logits, labels, threshold, temperatures or (1.0,) * 3)
  found = point.quality, point.depth, point.flops, point.agreement
  assert (*found, *point.shares) == pytest.approx(expected)
  assert (point.rule, point.value) == ('confidence', threshold)


def test_any_rule_of_the_logits_numpy_or_jax():
  logits, labels = recorded()

  def patience(logits):
    """The first head with the answer of the one before, in JAX."""
    answers = jnp.asarray(logits).argmax(-1)
    same = (answers[1:] == answers[:-1]).at[-1].set(True)
    return 1 + same.argmax(0)

  settings = [frontier.Setting('patience', 2.0, patience), frontier.never()]
  early, full = frontier.sweep(logits, labels, settings, layers=LAYERS)
  answers = logits.argmax(-1)
  leaves = np.where(answers[0] == answers[1], 1, 2)
  chosen = answers[leaves, np.arange(200)]
  assert early.quality == np.mean(chosen == labels)
  assert early.depth == pytest.approx(np.array(LAYERS)[leaves].mean())
  assert early.flops == pytest.approx(early.depth / 12)  # layers are the cost
  assert early.shares == pytest.approx(
    (0.0, np.mean(leaves == 1), np.mean(leaves == 2))
  )
  assert (full.depth, full.flops, full.agreement) == (12.0, 1.0, 1.0)
  assert full.shares == (0.0, 0.0, 1.0)
  assert full.quality == np.mean(answers[2] == labels)


def test_flops_may_differ_from_row_to_row_and_against_another_model():
  logits, labels = recorded(rows=2)
  setting = frontier.Setting('fixed', None, lambda logits: np.array([0, 2]))
  table = np.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
  options = dict(layers=LAYERS, flops=table)
  [own] = frontier.sweep(logits, labels, [setting], **options)
  assert own.flops == pytest.approx((1 + 30) / (3 + 30))
  [dense] = frontier.sweep(
    logits, labels, [setting], full_flops=np.array([6.0, 56.0]), **options
  )
  assert dense.flops == pytest.approx(31 / 62)
  [number] = frontier.sweep(
    logits, labels, [setting], full_flops=62.0, **options
  )
  assert number.flops == pytest.approx(31 / 124)


def test_regression_needs_its_own_measures():
  logits = np.array([[[1.0], [2.0]], [[1.5], [2.0]]])
  labels = np.array([1.5, 2.5], np.float32)
  options = dict(layers=(1, 2))
  options['quality'] = lambda z, y: -float(np.square(z[:, 0] - y).mean())
  [point] = frontier.sweep(
    logits,
    labels,
    [frontier.Setting('fixed', None, lambda logits: np.array([0, 0]))],
    agreement=lambda z, full: float((np.abs(z - full) < 0.1).mean()),
    **options,
  )
  assert point.quality == pytest.approx(-0.25)
  assert point.agreement == 0.5


def test_pareto_by_hand():
  cost = np.array([1.0, 2.0, 2.0, 3.0, 3.0, 4.0, np.nan])
  quality = np.array([0.5, 0.7, 0.6, 0.7, 0.9, 0.8, 1.0])
  expected = [True, True, False, False, True, False, False]
  np.testing.assert_array_equal(frontier.pareto(cost, quality), expected)
  same = frontier.pareto(np.ones(2), np.ones(2))
  np.testing.assert_array_equal(same, [True, True])
  assert frontier.pareto(np.zeros(0), np.zeros(0)).shape == (0,)


def outputs(variables, batch):
  """Three heads of which later ones have seen more of the sequence."""
  heads = []
  for head, seen in enumerate((8, 9, 10)):
    ones = (batch['tokens'][:, :seen] == 0).sum(1)
    sign = 1.0 - 2.0 * (ones % 2).astype(jnp.float32)
    # Confidences of 0.62, 0.85 and 0.95 by a token of no importance.
    token = batch['tokens'][:, head].astype(jnp.float32)
    margin = (0.25 + 0.6 * token) * variables['scale']
    heads.append(jnp.stack([sign * margin, -sign * margin], 1))
  return {'logits': jnp.stack(heads, 1)}


VARIABLES = {'scale': jnp.float32(1.0)}


def build(workdir='', **entry):
  context = eval_context(PARITY, jax.jit(outputs), 128, workdir)
  entry = dict(type='frontier', split='test') | entry
  return evaluator.build('tau', entry, context)


def test_evaluator_sweeps_and_writes_a_csv(tmp_path):
  built = build(tmp_path, layers=LAYERS, flops=FLOPS)
  result = built.run(VARIABLES)
  assert len(result) == 4 * 4 + 1 + 3
  logits, labels = built.heads('split', VARIABLES)
  logits = logits.astype(np.float64)
  for layer, head in zip(LAYERS, logits, strict=True):
    right = [
      row.argmax() == label for row, label in zip(head, labels, strict=True)
    ]
    assert result[f'accuracy_layer_{layer}'] == sum(right) / len(right)
  for threshold in (0.80, 0.85, 0.90, 0.95):
    expected = loop(logits, labels, threshold, (1.0,) * 3)
    names = ('accuracy', 'depth', 'flops', 'agreement')
    found = [result[f'{name}_tau_{threshold:g}'] for name in names]
    assert found == pytest.approx(list(expected[:4]))
  with (tmp_path / 'frontier.csv').open(newline='') as file:
    table = list(csv.DictReader(file))
  assert [row['rule'] for row in table] == ['confidence'] * 4 + ['never']
  assert [row['value'] for row in table] == ['0.8', '0.85', '0.9', '0.95', '']
  assert list(table[0]) == [
    'rule', 'value', 'accuracy', 'depth', 'flops', 'agreement',
    'exit_4', 'exit_8', 'exit_12',
  ]  # fmt: skip
  for row in table[:-1]:
    key = f'depth_tau_{row["value"]}'
    assert float(row['depth']) == pytest.approx(result[key], rel=1e-5)
  assert float(table[-1]['accuracy']) == result['accuracy_full'] == 1.0
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


def test_evaluator_fits_temperatures_on_another_split():
  plain = build(thresholds=(0.9,))
  scaled = build(thresholds=(0.9,), calibration_split='train')
  held_out = scaled.heads('calibration_split', VARIABLES)
  temperatures = fit_temperatures(*held_out)
  assert temperatures[0] > 1.2  # the first head is over-confident
  logits, labels = scaled.heads('split', VARIABLES)
  [expected] = frontier.sweep(
    logits,
    labels,
    [frontier.confidence(0.9, temperatures)],
    layers=(1, 2, 3),
  )
  result = scaled.run(VARIABLES)
  assert result['depth_tau_0.9'] == expected.depth
  assert result['depth_tau_0.9'] > plain.run(VARIABLES)['depth_tau_0.9']


def test_dense_flops_scale_the_share():
  own = build(flops=FLOPS, thresholds=(0.9,)).run(VARIABLES)
  dense = build(flops=FLOPS, full_flops=50, thresholds=(0.9,)).run(VARIABLES)
  assert dense['flops_tau_0.9'] == pytest.approx(own['flops_tau_0.9'] / 2)


def test_tables_must_fit_the_heads():
  with pytest.raises(ConfigError, match='flops: expected 3 numbers'):
    build(flops=(1.0, 2.0)).run(VARIABLES)
  with pytest.raises(ConfigError, match='layers: expected 3 layers'):
    build(layers=(4, 12)).run(VARIABLES)


def test_evaluator_writes_nothing_without_a_workdir(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  build().run(VARIABLES)
  assert not list(tmp_path.iterdir())
