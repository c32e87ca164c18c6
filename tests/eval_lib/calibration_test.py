"""ECE, temperatures, drift statistics by hand and by loops; the evaluator."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from core.errors import ConfigError
from eval_lib import calibration
from eval_lib.calibration import fit_temperature
from halting.row_rules import scale, softmax
from serve_lib import monitor
from tests.contexts import evaluator_of, rows_on


def ece(*arguments):
  return calibration.reliability(*arguments).error


def confident(*confidences):
  """Two classes; class 0 is predicted with these confidences."""
  first = np.array(confidences)
  return np.stack([first, 1 - first], 1)


def test_confidences_at_the_ends():
  # Right with confidence 0 is off by 1, right with confidence 1 by nothing.
  assert ece(np.array([[0.0, 0.0], [1.0, 0.0]]), np.array([0, 0])) == 0.5
  rounded = np.array([[1.0000001, 0.0]], np.float32)
  assert ece(rounded, np.array([0])) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize('bins', [1, 4, 15])
@pytest.mark.parametrize('classes', [2, 3])
def test_ece_equals_a_loop(bins, classes):
  rng = np.random.default_rng(bins)
  rows = softmax(2 * rng.normal(size=(200, classes)))
  # Some right on the edges of the bins.
  rows[:20] = 0.0
  rows[np.arange(20), 0] = np.linspace(0, 1, 16)[rng.integers(8, 16, 20)]
  rows[:20, 1] = 1 - rows[:20, 0]
  labels = rng.integers(0, classes, 200)
  table, error = calibration.reliability(rows, labels, bins), 0.0
  for place, low in enumerate(np.linspace(0, 1, bins + 1)[:-1]):
    inside = [
      (1, max(row), row.argmax() == label)
      for row, label in zip(rows, labels, strict=True)
      if low < max(row) <= low + 1 / bins + 1e-12
    ]
    count, *sums = np.sum(np.array(inside, float).reshape(-1, 3), axis=0)
    means = [total / count if count else np.nan for total in sums]
    found = [column[place] for column in vars(table).values()]
    np.testing.assert_allclose(found, [count, *means])
    error += count / 200 * abs(means[1] - means[0]) if count else 0.0
  assert table.error == pytest.approx(error, abs=1e-12)


def test_rows_without_confidences_are_errors():
  with pytest.raises(ValueError, match='at least one row'):
    ece(confident(), np.array([], int))
  with pytest.raises(ValueError, match=r'in \[0, 1\]'):
    ece(confident(0.81, np.nan), np.array([0, 0]))


def calibrated(rows, classes):
  """Logits, and labels that their softmax is calibrated for."""
  logits = 1.5 * np.random.default_rng(0).normal(size=(rows, classes))
  uniform = np.random.default_rng(1).random(logits.shape)
  return logits, (logits - np.log(-np.log(uniform))).argmax(-1)


@pytest.mark.parametrize('seed', range(10))
def test_no_other_temperature_is_better(seed):
  rng = np.random.default_rng(seed)
  logits = rng.exponential(3) * rng.normal(size=(rng.integers(8, 40), 3))
  labels = rng.integers(0, 3, len(logits))
  fitted = fit_temperature(logits, labels)
  low, high = calibration.TEMPERATURES
  assert low <= fitted <= high
  best, one, *grid = (
    np.log(t) ** 2 / (2 * calibration.SPREAD**2)
    - scipy.special.log_softmax(logits / t, 1)[range(len(labels)), labels].sum()
    for t in (fitted, 1.0, *np.geomspace(low, high, 200))
  )
  assert best <= min(one, min(grid) + 1e-9)


def test_a_bound_of_the_search_is_a_warning(caplog):
  # Never wrong, or always wrong.
  labels, sure = np.array([0, 1] * 99), np.array([[0.2, 0], [0, 0.2]] * 99)
  heads = np.stack([np.zeros((198, 2)), sure, -10 * sure])
  with caplog.at_level(logging.WARNING):
    fitted = calibration.fit_temperatures(heads, labels)
  assert fitted.tolist() == [1.0, 0.1, 10.0]
  first, second = caplog.messages
  assert 'head 2 of 3: the temperature 0.1 is the bound' in first
  assert 'head 3 of 3: the temperature 10 is the bound' in second


@pytest.mark.parametrize(('margin', 'rows'), [(0.5, 20), (-0.5, 20), (2.0, 2)])
def test_rows_that_are_all_right_or_wrong_make_no_certainty(margin, rows):
  logits = np.tile([margin, 0.0], (rows, 1))
  fitted = fit_temperature(logits, np.zeros(rows, int))
  assert 0.2 < fitted < 5
  # By hand: the slopes of the likelihood and of the prior by log T cancel.
  wrong = scipy.special.expit(-margin / fitted)
  pull = np.log(fitted) / calibration.SPREAD**2
  assert rows * margin / fitted * wrong == pytest.approx(-pull, rel=1e-4)


@pytest.mark.parametrize(('rows', 'true', 'most'), [
  (16, 1.0, 0.5), (16, 2.0, 1.0), (2000, 2.0, 0.1),
])  # fmt: skip
def test_a_prior_helps_few_rows_and_not_many(rows, true, most):
  """EAT fits by the likelihood alone, `exact`: errors of log T against it."""
  errors = {'prior': [], 'exact': []}
  for seed in range(40):
    rng = np.random.default_rng(seed)
    logits = 2.0 * rng.normal(size=(rows, 3))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    grid = np.geomspace(*calibration.TEMPERATURES, 400)
    losses = [
      -scipy.special.log_softmax(true * logits / t, 1)[
        range(rows), labels
      ].sum()
      for t in grid
    ]
    errors['exact'].append(np.log(grid[np.argmin(losses)] / true) ** 2)
    fitted = fit_temperature(true * logits, labels)
    errors['prior'].append(np.log(fitted / true) ** 2)
  ratio = np.mean(errors['prior']) / np.mean(errors['exact'])
  assert ratio < most if rows < 100 else abs(ratio - 1) < most


def test_only_heads_with_a_large_error_are_scaled():
  true, labels = calibrated(8000, 2)
  logits = np.stack([3 * true, true])
  errors = calibration.errors(logits, labels)
  assert errors[0] > 0.02 > errors[1]
  for only_above, expected in (
    (0.02, [pytest.approx(3.0, rel=0.1), 1.0]), (1.0, [1.0, 1.0]),
  ):  # fmt: skip
    fitted = calibration.fit_temperatures(logits, labels, only_above=only_above)
    assert fitted.tolist() == expected
  assert calibration.fit_temperatures(logits, labels, only_above=0.0)[1] != 1.0


def drift_check(confidences):
  """The check of serving, of statistics as JSON has them."""
  rows = confident(*confidences)
  heads = np.log([rows, np.full_like(rows, 0.5)])
  found = json.loads(json.dumps(calibration.drift_statistics(heads, 0.9)))
  return monitor.DriftCheck(np.array(found['confidences']), found['threshold'])


def test_drift_statistics_are_those_of_the_first_head():
  normal = drift_check([0.95, 0.6, 0.9, 0.5])
  np.testing.assert_allclose(normal.confidences, [0.5, 0.6, 0.9, 0.95])
  sure = normal.confidences.astype('f') >= np.float32(normal.threshold)
  assert sure.tolist() == [False, False, True, True]
  # Of many confidences an even sample is kept.
  many = np.random.default_rng(0).uniform(0.5, 1.0, 10_000)
  normal = drift_check(many)
  assert len(normal.confidences) == calibration.MAX_CONFIDENCES
  assert scipy.stats.ks_2samp(normal.confidences, many).statistic < 1e-3


def test_a_fingerprint_is_of_values_and_not_of_placement():
  values = np.arange(16, dtype=np.float32)
  changed = values.copy()
  changed[3] = np.nextafter(changed[3], np.float32(9))

  def fingerprint(array):
    return calibration.fingerprint({'params': {'a': array, 'b': np.ones(2)}})

  whole = fingerprint(values)
  assert fingerprint(rows_on(8)(values)) == whole
  assert len({whole, fingerprint(changed), fingerprint(values[:, None])}) == 3


PARITY = dict(name='parity', length=10, train_examples=900, test_examples=700)
VARIABLES = {'scale': jnp.float32(1.0)}


def outputs(variables, batch):
  """Two over-confident heads that know a part of the sequence."""
  tokens, margins = batch['tokens'], []
  for seen, factor in ((6, 4.0), (10, 2.0)):
    is_odd = (tokens[:, :seen] == 0).sum(1) % 2 > 0
    # Tokens that have nothing to do with it make the margin vary.
    margin = factor * (1.0 + tokens[:, 0].astype(jnp.float32))
    margins.append(jnp.where(is_odd, -margin, margin))
  margins = jnp.stack(margins, 1) * variables['scale']
  return {'logits': jnp.stack([margins, -margins], 2)}


def build(workdir='', of=outputs, **entry):
  entry = dict(split='test', calibration_split='train') | entry
  context = dict(outputs=jax.jit(of), workdir=workdir, batch_size=256)
  return evaluator_of('calibration', PARITY, context, **entry)


def test_evaluator_fits_on_one_split_and_reports_the_other(tmp_path):
  built = build(tmp_path, layers=(4, 12))
  result = built.run(VARIABLES)
  report = json.loads((tmp_path / 'calibration.json').read_text())
  fitted = built.heads('calibration_split', VARIABLES)
  logits, labels = built.heads('split', VARIABLES)
  scales = calibration.fit_temperatures(*fitted)
  errors = calibration.errors(logits, labels)
  scaled = calibration.errors(scale(logits, scales), labels)
  expected = [('ece', errors), ('ece_calibrated', scaled)]
  assert result == {
    f'{key}_layer_{layer}': values[head]
    for key, values in (*expected, ('temperature', scales.tolist()))
    for head, layer in enumerate((4, 12))
  }
  # The first head guesses, with confidence; the last one knows.
  assert result['temperature_layer_4'] > 5
  assert result['ece_layer_4'] > 0.3 > result['ece_calibrated_layer_4']
  assert result['temperature_layer_12'] == 1.0
  assert len(report['drift'].pop('confidences')) == 900
  assert report.pop('dataset')['train_examples'] == 900
  assert report == dict(
    expected, parameters=calibration.fingerprint(VARIABLES),
    calibration_split='train', calibration_rows=900,
    calibration_ece=calibration.errors(*fitted), temperatures=scales.tolist(),
    drift={'threshold': 0.9}, split='test', rows=700, layers=[4, 12], bins=15,
  )  # fmt: skip


def test_one_head_has_no_name():
  def last(variables, batch):
    return {k: v[:, -1:] for k, v in outputs(variables, batch).items()}

  names = {'ece', 'ece_calibrated', 'temperature'}
  assert build(of=last).run(VARIABLES).keys() == names


def test_splits_must_differ_and_layers_fit_the_heads():
  field = r'^evals.test.calibration_split'
  with pytest.raises(ConfigError, match=f'{field}: .* it shares'):
    build(calibration_split='test')
  with pytest.raises(ConfigError, match='layers: expected 2 layers'):
    build(layers=(4, 8, 12)).run(VARIABLES)
