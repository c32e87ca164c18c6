"""ECE, temperatures, drift statistics by hand and by loops; the evaluator."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataset_lib.errors import ConfigError
from eval_lib import calibration, evaluator, predictions
from eval_lib.calibration import fit_temperature, negative_log_likelihood
from serve_lib import drift
from tests.contexts import eval_context


def expected_calibration_error(*arguments, **options):
  return calibration.reliability(*arguments, **options).error


def confident(*confidences):
  """Two classes; class 0 is predicted with these confidences."""
  first = np.array(confidences)
  return np.stack([first, 1 - first], 1)


def test_ece_by_hand():
  # Two bins of 2 and 1 rows: (2/3) |1/2 - 0.825| + (1/3) |1 - 0.95|.
  rows = confident(0.81, 0.84, 0.95)
  error = expected_calibration_error(rows, np.array([0, 1, 0]), bins=10)
  assert error == pytest.approx(2 / 3 * 0.325 + 1 / 3 * 0.05)
  table = calibration.reliability(rows, np.array([0, 1, 0]), bins=10)
  np.testing.assert_array_equal(table.count, [0] * 8 + [2, 1])
  np.testing.assert_allclose(table.accuracy[-2:], [0.5, 1.0])
  np.testing.assert_allclose(table.confidence[-2:], [0.825, 0.95])
  assert np.isnan(table.accuracy[:8]).all()
  assert table.error == error
  np.testing.assert_allclose(table.edges, np.arange(11) / 10)


def test_calibrated_in_each_bin_is_zero_and_always_wrong_is_the_confidence():
  rows = confident(0.75, 0.75, 0.75, 0.75)
  assert expected_calibration_error(rows, np.array([0, 0, 0, 1])) == 0.0
  assert expected_calibration_error(rows, np.ones(4, int)) == 0.75


def test_confidences_of_0_and_1_have_a_bin():
  rows = np.array([[0.0, 0.0], [1.0, 0.0]])
  table = calibration.reliability(rows, np.array([0, 0]))
  assert table.count[0] == table.count[-1] == 1
  assert table.count.sum() == 2
  # Right with confidence 0 is off by 1, right with confidence 1 by nothing.
  assert table.error == pytest.approx(0.5)
  over = np.array([[1.0000001, 0.0]], np.float32)  # a float32 softmax
  assert calibration.reliability(over, np.array([0])).count[-1] == 1


def loop_ece(probabilities, labels, bins):
  error, rows = 0.0, len(labels)
  edges = np.linspace(0, 1, bins + 1)
  for b in range(bins):
    inside = []
    for row in range(rows):
      confidence = max(probabilities[row])
      if edges[b] < confidence <= edges[b + 1]:
        inside.append((confidence, probabilities[row].argmax() == labels[row]))
    if inside:
      confidence, right = np.mean(np.array(inside, float), axis=0)
      error += len(inside) / rows * abs(right - confidence)
  return error


@pytest.mark.parametrize('bins', [1, 4, 15])
@pytest.mark.parametrize('classes', [2, 3])
def test_ece_equals_a_loop(bins, classes):
  rng = np.random.default_rng(bins)
  logits = 2 * rng.normal(size=(1, 200, classes))
  rows = predictions.probabilities(logits)[0]
  # Some right on the edges of the bins.
  rows[:20] = 0.0
  rows[np.arange(20), 0] = np.linspace(0, 1, 16)[rng.integers(8, 16, 20)]
  rows[:20, 1] = 1 - rows[:20, 0]
  labels = rng.integers(0, classes, 200)
  expected = loop_ece(rows, labels, bins)
  assert expected_calibration_error(rows, labels, bins) == pytest.approx(
    expected, abs=1e-12
  )


def test_padding_never_counts():
  rows = confident(0.81, np.nan, 0.95, 0.6)
  labels, mask = np.array([0, 0, 1, 1]), np.array([1.0, 0.0, 1.0, 0.0])
  subset = expected_calibration_error(rows[[0, 2]], labels[[0, 2]])
  assert expected_calibration_error(rows, labels, mask=mask) == subset
  assert expected_calibration_error(rows, labels, mask=mask > 0) == subset
  with pytest.raises(ValueError, match='at least one row'):
    expected_calibration_error(rows, labels, mask=np.zeros(4))
  with pytest.raises(ValueError, match=r'in \[0, 1\]'):
    expected_calibration_error(rows, labels)


def draw_labels(logits, seed=1):
  """Labels that the softmax of the logits is calibrated for."""
  rng = np.random.default_rng(seed)
  gumbel = -np.log(-np.log(rng.random(logits.shape)))
  return (logits + gumbel).argmax(-1)


@pytest.mark.parametrize('temperature', [0.4, 1.0, 2.5, 6.0])
@pytest.mark.parametrize('classes', [2, 3])
def test_a_known_temperature_is_recovered(temperature, classes):
  rng = np.random.default_rng(0)
  true = 1.5 * rng.normal(size=(20_000, classes))
  labels = draw_labels(true)
  logits = temperature * true
  found = fit_temperature(logits, labels)
  # The standard error of log T is about 0.015 here.
  assert found == pytest.approx(temperature, rel=0.05)
  # At the minimum the derivative by 1 / T is 0: E_P[z] = z of the label.
  probabilities = predictions.probabilities(logits[None] / found)[0]
  own = logits[np.arange(len(labels)), labels]
  slope = ((probabilities * logits).sum(1) - own).mean()
  assert abs(slope) < 1e-4
  heads = predictions.probabilities(logits[None], np.array([found]))
  before = expected_calibration_error(
    predictions.probabilities(logits[None])[0], labels
  )
  after = expected_calibration_error(heads[0], labels)
  assert after < 0.02
  assert after < before or temperature == 1.0


def test_nll_by_hand_and_stable():
  logits = np.log([[1.0, 3.0], [1.0, 1.0]])
  expected = -np.mean(np.log([0.75, 0.5]))
  labels = np.array([1, 0])
  assert negative_log_likelihood(logits, labels) == pytest.approx(expected)
  halved = negative_log_likelihood(2 * logits, labels, 2.0)
  assert halved == pytest.approx(expected)
  extreme = negative_log_likelihood(np.array([[1e5, 0.0]]), np.array([1]), 0.1)
  assert extreme == pytest.approx(1e6)


@pytest.mark.parametrize('seed', range(20))
def test_never_worse_than_no_temperature(seed):
  rng = np.random.default_rng(seed)
  logits = rng.exponential(3) * rng.normal(size=(rng.integers(1, 40), 3))
  labels = rng.integers(0, 3, len(logits))
  found = fit_temperature(logits, labels)
  best = negative_log_likelihood(logits, labels, found)
  low, high = calibration.TEMPERATURES
  assert low <= found <= high
  grid = np.geomspace(low, high, 200)
  others = [negative_log_likelihood(logits, labels, t) for t in [1.0, *grid]]
  assert best <= others[0]
  assert best <= min(others) + 1e-9


def test_separable_and_constant_data_stay_bounded():
  logits = np.array([[2.0, 0.0], [0.0, 2.0]])
  assert fit_temperature(logits, np.array([0, 1])) == 0.1
  assert fit_temperature(logits, np.array([0, 1]), (0.5, 4.0)) == 0.5
  assert fit_temperature(logits, np.array([1, 0])) == 10.0  # always wrong
  assert fit_temperature(np.zeros((4, 3)), np.array([0, 1, 2, 0])) == 1.0


def test_only_heads_with_a_large_error_are_scaled():
  rng = np.random.default_rng(0)
  true = 1.5 * rng.normal(size=(8000, 2))
  labels = draw_labels(true)
  logits = np.stack([3 * true, true])
  errors = calibration.errors(logits, labels)
  assert errors[0] > 0.02 > errors[1]
  temperatures = calibration.fit_temperatures(logits, labels)
  assert temperatures[1] == 1.0
  assert temperatures[0] == pytest.approx(3.0, rel=0.1)
  kept = calibration.fit_temperatures(logits, labels, only_above=1.0)
  np.testing.assert_array_equal(kept, [1.0, 1.0])
  always = calibration.fit_temperatures(logits, labels, only_above=0.0)
  assert always[1] != 1.0


def test_drift_statistics_by_hand():
  first = confident(0.95, 0.6, 0.9, 0.5)
  last = confident(0.5, 0.7, 0.5, 0.8)
  heads = np.stack([first, last])
  found = calibration.drift_statistics(heads, 0.9)
  json.dumps(found, allow_nan=False)
  # The form that the drift check of serving reads.
  normal = drift.Calibration.from_dict(found)
  np.testing.assert_array_equal(normal.confidences, [0.5, 0.6, 0.9, 0.95])
  assert normal.sure(normal.confidences).tolist() == [False, False, True, True]


def test_of_many_confidences_an_even_sample_is_kept():
  rng = np.random.default_rng(0)
  heads = confident(*rng.uniform(0.5, 1.0, 10_000))[None]
  normal = drift.Calibration.from_dict(calibration.drift_statistics(heads, 0.9))
  assert len(normal.confidences) == calibration.MAX_CONFIDENCES
  distance, _ = drift.confidence_test(normal.confidences, heads[0].max(-1))
  assert distance < 1e-3


def test_a_fingerprint_is_of_values_and_not_of_placement():
  mesh = jax.make_mesh((8,), ('data',))
  spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  values = np.arange(16, dtype=np.float32)
  tree = {'params': {'a': values, 'b': np.float32(3.0)}, 'model_state': {}}
  moved = {**tree, 'params': {**tree['params']}}
  moved['params']['a'] = jax.device_put(values, spread)
  known = calibration.fingerprint(tree)
  assert calibration.fingerprint(moved) == known
  changed = values.copy()
  changed[3] = np.nextafter(changed[3], np.float32(9))
  tree['params']['a'] = changed
  assert calibration.fingerprint(tree) != known
  tree['params']['a'] = values.reshape(4, 4)
  assert calibration.fingerprint(tree) != known


PARITY = dict(name='parity', length=10, train_examples=900, test_examples=700)


def outputs(variables, batch):
  """Two over-confident heads that know a part of the sequence."""
  heads = []
  for seen, scale in ((6, 4.0), (10, 2.0)):
    ones = (batch['tokens'][:, :seen] == 0).sum(1)
    sign = 1.0 - 2.0 * (ones % 2).astype(jnp.float32)
    # Tokens that have nothing to do with it make the margin vary.
    margin = 1.0 + batch['tokens'][:, 0].astype(jnp.float32)
    heads.append(scale * jnp.stack([sign * margin, -sign * margin], 1))
  return {'logits': jnp.stack(heads, 1) * variables['scale']}


def build(workdir='', **entry):
  context = eval_context(PARITY, jax.jit(outputs), 256, workdir)
  entry = dict(split='test', calibration_split='train') | entry
  return evaluator.build('ece', dict(type='calibration') | entry, context)


VARIABLES = {'scale': jnp.float32(1.0)}


def test_evaluator_fits_on_one_split_and_reports_the_other(tmp_path):
  built = build(tmp_path, layers=(4, 12))
  result = built.run(VARIABLES)
  report = json.loads((tmp_path / 'calibration.json').read_text())
  held_out, test = (
    built.heads(field, VARIABLES) for field in ('calibration_split', 'split')
  )
  for head, name in enumerate(('layer_4', 'layer_12')):
    temperature = 1.0
    logits, labels = held_out[0][head].astype(np.float64), held_out[1]
    rows = predictions.probabilities(logits[None])[0]
    if calibration.reliability(rows, labels).error > 0.02:
      temperature = fit_temperature(logits, labels)
    logits, labels = test[0][head].astype(np.float64), test[1]
    for key, t in (('ece', 1.0), ('ece_calibrated', temperature)):
      rows = predictions.probabilities(logits[None] / t)[0]
      expected = calibration.reliability(rows, labels).error
      # In float64 here, in float32 there.
      assert result[f'{key}_{name}'] == pytest.approx(expected, abs=1e-6)
      assert report[key][head] == result[f'{key}_{name}']
    assert result[f'temperature_{name}'] == pytest.approx(temperature)
    assert report['temperatures'][head] == result[f'temperature_{name}']
  # The first head guesses, with confidence; the last one knows.
  assert result['temperature_layer_4'] > 5
  assert result['ece_layer_4'] > 0.3 > result['ece_calibrated_layer_4']
  assert result['temperature_layer_12'] == 1.0
  assert len(result) == 6
  assert report['guarantee'] is None
  assert (report['calibration_rows'], report['rows']) == (900, 700)
  assert (report['calibration_split'], report['split']) == ('train', 'test')
  assert report['layers'] == [4, 12]
  assert report['drift']['threshold'] == 0.9
  assert len(report['drift']['confidences']) == 900
  assert report['parameters'] == calibration.fingerprint(VARIABLES)
  assert report['dataset']['name'] == 'parity'
  assert report['dataset']['train_examples'] == 900


def test_evaluator_certifies_on_the_split_that_nothing_was_fitted_to(tmp_path):
  built = build(tmp_path, epsilon=0.49, delta=0.1)
  result = built.run(VARIABLES)
  guarantee = json.loads((tmp_path / 'calibration.json').read_text())[
    'guarantee'
  ]
  assert guarantee['rows'] == 700
  assert guarantee['loss'] == 'disagreement'
  assert guarantee['bound'] <= guarantee['epsilon'] == 0.49
  assert result['guaranteed_early'] == guarantee['early'] < 1.0
  strict = build(tmp_path, epsilon=0.001, delta=0.1)
  result = strict.run(VARIABLES)
  assert result['guaranteed_early'] == 0.0
  assert 'guaranteed_threshold' not in result


def test_evaluator_writes_nothing_without_a_workdir(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert 'ece_head_1' in build().run(VARIABLES)
  assert not list(tmp_path.iterdir())


def test_the_splits_must_differ():
  with pytest.raises(
    ConfigError, match=r'^evals.ece.calibration_split: expected another'
  ):
    build(calibration_split='test')


def test_layers_must_fit_the_heads():
  with pytest.raises(ConfigError, match='layers: expected 2 layers'):
    build(layers=(4, 8, 12)).run(VARIABLES)
