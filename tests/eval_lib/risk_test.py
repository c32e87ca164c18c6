"""The guarantee by hand, against the textbook, and over 200 resamplings."""

import numpy as np
import pytest
import scipy.stats

from eval_lib import predictions, risk

DRAWS, DELTA = 200, 0.1
# A method that fails with probability delta in a draw stays within this number
# of failures in 200 draws with probability 0.999: 34, for an average of 20.
ALLOWED = int(scipy.stats.binom.ppf(0.999, DRAWS, DELTA))


def population(rows, classes=2, seed=0):
  """Logits `[3, rows, classes]` and labels: later heads know more."""
  rng = np.random.default_rng(seed)
  labels = rng.integers(0, classes, rows)
  signal = np.eye(classes)[labels]
  noise = rng.normal(size=(3, rows, classes)).cumsum(0)[::-1]
  strength = rng.exponential(1.0, rows)[:, None]
  return np.stack([3 * strength * signal + n for n in noise]), labels


def losses_of(logits, labels, kind='disagreement'):
  thresholds, exits = risk.confidence_sweep(predictions.probabilities(logits))
  if kind == 'harm':
    return risk.harm(logits, exits, labels), thresholds
  return risk.disagreement(logits, exits), thresholds


def uncorrected(losses, thresholds, epsilon, delta):
  """The usual mistake: the riskiest threshold that looks good enough."""
  good = np.flatnonzero(losses.mean(0) <= epsilon)
  threshold = float(thresholds[good[-1]])
  return risk.Guarantee(threshold, epsilon, delta, len(losses), 0, 0.0, 0)


@pytest.mark.parametrize(
  ('kind', 'epsilon', 'rows', 'classes'),
  [
    ('disagreement', 0.1, 200, 2),
    pytest.param('disagreement', 0.05, 500, 3, marks=pytest.mark.slow),
    ('harm', 0.05, 500, 2),
    pytest.param('harm', 0.1, 200, 3, marks=pytest.mark.slow),
  ],
)
def test_risk_exceeds_epsilon_in_at_most_a_share_delta(
  kind, epsilon, rows, classes, monkeypatch
):
  losses = losses_of(*population(20_000, classes), kind)
  options = dict(rows=rows, draws=DRAWS)
  risks = risk.resampled_risk(*losses, epsilon, DELTA, **options)
  assert (risks > epsilon).sum() <= ALLOWED
  # Not by never exiting: most of the allowance is used.
  assert np.median(risks) > epsilon / 3
  # The same test catches a method without correction.
  monkeypatch.setattr(risk, 'guaranteed_threshold', uncorrected)
  risks = risk.resampled_risk(*losses, epsilon, DELTA, **options)
  assert (risks > epsilon).sum() > ALLOWED


def columns(*errors, rows=100):
  """Losses `[rows, K]` with so many errors in each column."""
  return np.arange(rows)[:, None] < np.array(errors)


@pytest.mark.parametrize('rows', [1, 7, 40])
@pytest.mark.parametrize('delta', [0.05, 0.3])
def test_the_bound_is_that_of_clopper_and_pearson(rows, delta):
  for errors in range(rows + 1):
    test = scipy.stats.binomtest(errors, rows)
    high = test.proportion_ci(1 - 2 * delta, method='exact').high
    losses = columns(errors, rows=rows)
    for epsilon in (0.01, 0.1, 0.5, 0.9):
      found = risk.guaranteed_threshold(losses, np.ones(1), epsilon, delta)
      assert (found.threshold is not None) == (high <= epsilon)
      assert found.bound == pytest.approx(high if found.certified else 0.0)


@pytest.mark.parametrize(
  ('errors', 'threshold', 'certified'),
  [
    # Of 100 rows, 5 errors are the most with p <= 0.1 at epsilon 0.1.
    ((0, 5, 6, 2), 0.9, 2),
    ((0, 1, 2, 5), 0.7, 4),
    ((50, 0, 0, 0), None, 0),
  ],
)
def test_stops_at_the_first_failure(errors, threshold, certified):
  thresholds = np.array([1.0, 0.9, 0.8, 0.7])
  found = risk.guaranteed_threshold(columns(*errors), thresholds, 0.1, 0.1)
  lost = errors[certified - 1] if certified else 0
  expected = (threshold, 0.1, 0.1, 100, lost, found.bound, certified)
  assert found == risk.Guarantee(*expected)
  assert 0.0 <= found.bound <= 0.1


def test_losses_by_hand():
  early = [[3.0, 0], [3, 0], [0, 3], [0, 3]]
  full = [[2.0, 0], [0, 2], [2, 0], [0, 2]]
  logits, labels = np.array([early, full]), np.array([0, 1, 1, 1])
  exits = np.array([[1, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]])
  # Rows 1 and 2 change their answer; only at row 1 was the full model right.
  differ, harmed = [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0]], [0, 1, 0, 0]
  np.testing.assert_array_equal(risk.disagreement(logits, exits).T, differ)
  np.testing.assert_array_equal(
    risk.harm(logits, exits, labels).T, [[0, 0, 0, 0], harmed, harmed]
  )


@pytest.mark.parametrize('classes', [2, 3])
def test_thresholds_go_from_safest_to_riskiest(classes):
  _, thresholds = losses_of(*population(10, classes))
  assert thresholds[[0, -1]] == pytest.approx([1.0, 1 / classes])
  assert (np.diff(thresholds) < 0).all()


def test_certify_confidence_reports_how_many_leave_early():
  logits, _ = population(3000)
  heads = predictions.probabilities(logits)
  guarantee, early = risk.certify_confidence(heads, 0.05, 0.1)
  exits = predictions.confidence_exit(heads, guarantee.threshold)
  assert early == (exits < 2).mean() > 0.1
  answers = logits.argmax(-1)
  differ = answers[exits, np.arange(3000)] != answers[-1]
  assert differ.sum() == guarantee.errors
  assert risk.certify_confidence(heads[:, :10], 0.05, 0.1)[1] == 0.0
