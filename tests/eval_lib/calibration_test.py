"""ECE, temperatures, drift statistics by hand and by loops; the evaluator."""

import itertools
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from core.errors import ConfigError
from eval_lib import calibration, evaluator, predictions
from eval_lib.calibration import fit_temperature, negative_log_likelihood
from serve_lib import monitor
from tests.contexts import eval_context, rows_on


def ece(*arguments, **options):
  return calibration.reliability(*arguments, **options).error


def confident(*confidences):
  """Two classes; class 0 is predicted with these confidences."""
  first = np.array(confidences)
  return np.stack([first, 1 - first], 1)


def test_reliability_by_hand():
  # Two bins of 2 and 1 rows: (2/3) |1/2 - 0.825| + (1/3) |1 - 0.95|.
  rows, labels = confident(0.81, 0.84, 0.95), np.array([0, 1, 0])
  table = calibration.reliability(rows, labels, bins=10)
  assert table.error == pytest.approx(2 / 3 * 0.325 + 1 / 3 * 0.05)
  np.testing.assert_array_equal(table.count, [0] * 8 + [2, 1])
  nothing = [np.nan] * 8
  np.testing.assert_allclose(table.accuracy, [*nothing, 0.5, 1.0])
  np.testing.assert_allclose(table.confidence, [*nothing, 0.825, 0.95])
  # Right with confidence 0 is off by 1, right with confidence 1 by nothing.
  assert ece(np.array([[0.0, 0.0], [1.0, 0.0]]), np.array([0, 0])) == 0.5
  softmax = np.array([[1.0000001, 0.0]], np.float32)
  assert ece(softmax, np.array([0])) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize('bins', [1, 4, 15])
@pytest.mark.parametrize('classes', [2, 3])
def test_ece_equals_a_loop(bins, classes):
  rng = np.random.default_rng(bins)
  rows = predictions.probabilities(2 * rng.normal(size=(1, 200, classes)))[0]
  # Some right on the edges of the bins.
  rows[:20] = 0.0
  rows[np.arange(20), 0] = np.linspace(0, 1, 16)[rng.integers(8, 16, 20)]
  rows[:20, 1] = 1 - rows[:20, 0]
  labels = rng.integers(0, classes, 200)
  expected = 0.0
  for low, high in itertools.pairwise(np.linspace(0, 1, bins + 1)):
    inside = [
      (max(row), row.argmax() == label)
      for row, label in zip(rows, labels, strict=True)
      if low < max(row) <= high
    ]
    if inside:
      confidence, right = np.mean(np.array(inside, float), axis=0)
      expected += len(inside) / 200 * abs(right - confidence)
  assert ece(rows, labels, bins) == pytest.approx(expected, abs=1e-12)


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


@pytest.mark.parametrize('temperature', [0.4, 1.0, 2.5, 6.0])
@pytest.mark.parametrize('classes', [2, 3])
def test_a_known_temperature_is_recovered(temperature, classes):
  true, labels = calibrated(20_000, classes)
  logits = temperature * true
  found = fit_temperature(logits, labels)
  # The standard error of log T is about 0.015 here.
  assert found == pytest.approx(temperature, rel=0.05)
  [heads] = predictions.probabilities(logits[None], np.array([found]))
  # At the minimum the derivative by 1 / T is 0: E_P[z] = z of the label.
  own = logits[np.arange(len(labels)), labels]
  assert abs(((heads * logits).sum(1) - own).mean()) < 1e-4
  after = ece(heads, labels)
  assert after < 0.02
  [before] = calibration.errors(logits[None], labels)
  assert after < before or temperature == 1.0


def test_nll_by_hand_and_stable():
  logits = np.log([[1.0, 3.0], [1.0, 1.0]])
  expected = pytest.approx(-np.mean(np.log([0.75, 0.5])))
  labels = np.array([1, 0])
  assert negative_log_likelihood(logits, labels) == expected
  assert negative_log_likelihood(2 * logits, labels, 2.0) == expected
  extreme = negative_log_likelihood(np.array([[1e5, 0.0]]), np.array([1]), 0.1)
  assert extreme == pytest.approx(1e6)


@pytest.mark.parametrize('seed', range(10))
def test_never_worse_than_no_temperature(seed):
  rng = np.random.default_rng(seed)
  logits = rng.exponential(3) * rng.normal(size=(rng.integers(1, 40), 3))
  labels = rng.integers(0, 3, len(logits))
  found = fit_temperature(logits, labels)
  low, high = calibration.TEMPERATURES
  assert low <= found <= high
  best, one, *grid = (
    negative_log_likelihood(logits, labels, t)
    for t in (found, 1.0, *np.geomspace(low, high, 200))
  )
  assert best <= min(one, min(grid) + 1e-9)


def test_separable_and_constant_data_stay_bounded():
  logits = np.array([[2.0, 0.0], [0.0, 2.0]])
  assert fit_temperature(logits, np.array([0, 1])) == 0.1
  assert fit_temperature(logits, np.array([1, 0])) == 10.0  # always wrong
  assert fit_temperature(np.zeros((4, 3)), np.array([0, 1, 2, 0])) == 1.0


def test_a_bound_of_the_search_is_a_warning(caplog):
  labels, sure = np.array([0, 1]), np.array([[2.0, 0.0], [0.0, 2.0]])
  flat = np.zeros((2, 2))
  with caplog.at_level(logging.WARNING):
    found = calibration.fit_temperatures(np.stack([flat, sure, -sure]), labels)
  assert found.tolist() == [1.0, 0.1, 10.0]
  first, second = caplog.messages
  assert 'head 2 of 3: the temperature 0.1 is the bound' in first
  assert 'head 3 of 3: the temperature 10 is the bound' in second


def test_only_heads_with_a_large_error_are_scaled():
  true, labels = calibrated(8000, 2)
  logits = np.stack([3 * true, true])
  errors = calibration.errors(logits, labels)
  assert errors[0] > 0.02 > errors[1]
  temperatures = calibration.fit_temperatures(logits, labels)
  assert temperatures.tolist() == [pytest.approx(3.0, rel=0.1), 1.0]
  kept = calibration.fit_temperatures(logits, labels, only_above=1.0)
  np.testing.assert_array_equal(kept, [1.0, 1.0])
  always = calibration.fit_temperatures(logits, labels, only_above=0.0)
  assert always[1] != 1.0


def drift_check(found):
  return monitor.DriftCheck(np.array(found['confidences']), found['threshold'])


def test_drift_statistics_are_those_of_the_first_head():
  heads = np.stack([confident(0.95, 0.6, 0.9, 0.5), confident(*[0.7] * 4)])
  found = calibration.drift_statistics(heads, 0.9)
  # The form that the drift check of serving reads.
  normal = drift_check(json.loads(json.dumps(found)))
  np.testing.assert_array_equal(normal.confidences, [0.5, 0.6, 0.9, 0.95])
  assert normal.sure(normal.confidences).tolist() == [False, False, True, True]
  # Of many confidences an even sample is kept.
  heads = confident(*np.random.default_rng(0).uniform(0.5, 1.0, 10_000))[None]
  normal = drift_check(calibration.drift_statistics(heads, 0.9))
  assert len(normal.confidences) == calibration.MAX_CONFIDENCES
  found = scipy.stats.ks_2samp(normal.confidences, heads[0].max(-1))
  assert found.statistic < 1e-3


def test_a_fingerprint_is_of_values_and_not_of_placement():
  values = np.arange(16, dtype=np.float32)
  changed = values.copy()
  changed[3] = np.nextafter(changed[3], np.float32(9))

  def fingerprint(array):
    return calibration.fingerprint({'params': {'a': array, 'b': np.ones(2)}})

  known = fingerprint(values)
  assert fingerprint(rows_on(8)(values)) == known
  assert len({known, fingerprint(changed), fingerprint(values[:, None])}) == 3


PARITY = dict(name='parity', length=10, train_examples=900, test_examples=700)
VARIABLES = {'scale': jnp.float32(1.0)}


def outputs(variables, batch):
  """Two over-confident heads that know a part of the sequence."""
  tokens, margins = batch['tokens'], []
  for seen, scale in ((6, 4.0), (10, 2.0)):
    is_odd = (tokens[:, :seen] == 0).sum(1) % 2 > 0
    # Tokens that have nothing to do with it make the margin vary.
    margin = scale * (1.0 + tokens[:, 0].astype(jnp.float32))
    margins.append(jnp.where(is_odd, -margin, margin))
  margins = jnp.stack(margins, 1) * variables['scale']
  return {'logits': jnp.stack([margins, -margins], 2)}


def build(workdir='', **entry):
  context = eval_context(PARITY, jax.jit(outputs), 256, workdir)
  entry = dict(split='test', calibration_split='train') | entry
  return evaluator.build('ece', dict(type='calibration') | entry, context)


def test_evaluator_fits_on_one_split_and_reports_the_other(tmp_path):
  built = build(tmp_path, layers=(4, 12))
  result = built.run(VARIABLES)
  report = json.loads((tmp_path / 'calibration.json').read_text())
  fitted = built.heads('calibration_split', VARIABLES)
  other = built.heads('split', VARIABLES)
  scales = calibration.fit_temperatures(*fitted)
  errors = calibration.errors(*other)
  scaled = calibration.errors(*other, temperatures=scales)
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


def test_splits_must_differ_and_layers_fit_the_heads():
  field = r'^evals.ece.calibration_split'
  with pytest.raises(ConfigError, match=f'{field}: .* it shares'):
    build(calibration_split='test')
  with pytest.raises(ConfigError, match='layers: expected 2 layers'):
    build(layers=(4, 8, 12)).run(VARIABLES)
