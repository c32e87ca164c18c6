"""Risks and choices of settings by hand, and over 200 resamplings."""

import numpy as np
import pytest
import scipy.stats
from sklearn.metrics import f1_score

from benchmarks import risk_peers
from eval_lib import risk
from eval_lib.risk import Grid, Variant
from halting.row_rules import Confidence

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


def variant(logits, price=1.0, **changes):
  cost = np.tile(price * np.arange(1.0, len(logits) + 1), (logits.shape[1], 1))
  return Variant(changes, logits, cost)


@pytest.mark.parametrize(
  ('kind', 'method', 'epsilon', 'rows', 'classes'),
  [
    ('disagreement', 'sequence', 0.1, 200, 2),
    ('accuracy', 'sequence', 0.05, 500, 2),
    pytest.param('f1', 'sequence', 0.1, 300, 2, marks=pytest.mark.slow),
    pytest.param('brier', 'sequence', 0.05, 300, 3, marks=pytest.mark.slow),
    pytest.param('accuracy', 'pareto', 0.05, 1000, 2, marks=pytest.mark.slow),
  ],
)
def test_risk_exceeds_epsilon_in_at_most_a_share_delta(
  kind, method, epsilon, rows, classes, monkeypatch
):
  monkeypatch.setattr(risk, 'NUM_THRESHOLDS', 60)
  logits, labels = population(5000, classes)
  noisy = logits + np.random.default_rng(1).normal(size=logits.shape)
  models = [variant(logits), variant(noisy, 0.8, ratio=0.5)]
  grid = risk.build_grid(models, labels, kind, epsilon)
  risks, rng = grid.losses.mean(0), np.random.default_rng(0)
  certified, naive = [], []
  for _ in range(DRAWS):
    sample = grid.take(rng.integers(5000, size=rows))
    best, bound = risk.choose(sample, kind, method, epsilon, DELTA)
    certified.append(0.0 if best is None else risks[best])
    assert bound <= epsilon + 1e-6
    naive.append(risks[risk_peers.uncorrected(sample.losses, epsilon)])
  assert (np.array(certified) > epsilon).sum() <= ALLOWED
  # Not by never exiting.
  assert np.median(certified) > epsilon / 4
  # The same test catches a choice without correction.
  assert (np.array(naive) > epsilon).sum() > ALLOWED


def test_rows_that_are_sorted_by_class_are_certified_no_sooner():
  # A quarter of the rows, the last class, lose in 40 %: a risk of 0.1.
  rng, failures = np.random.default_rng(0), 0
  for _ in range(DRAWS):
    losses = np.zeros((100, 1))
    losses[75:] = rng.random((25, 1)) < 0.4
    best, _ = risk.choose(grid_of(losses), 'accuracy', 'sequence', 0.05, DELTA)
    failures += best is not None
  assert failures <= ALLOWED


def grid_of(losses):
  one = np.zeros(losses.shape[1], int)
  return Grid(one, 1.0 - one, one, losses, np.ones(losses.shape), 0.0 * one)


def by_errors(*errors, groups=None, rows=100, cost=None):
  """A grid whose settings lose on so many of the first rows."""
  losses, count = np.arange(rows)[:, None] < np.array(errors), len(errors)
  groups = np.array(groups or [0] * count)
  costs = np.tile(cost or np.linspace(1, 0.1, count), (rows, 1))
  thresholds = np.linspace(1.0, 0.5, count)
  return Grid(groups, thresholds, groups, losses, costs, np.zeros(count))


@pytest.mark.parametrize(
  ('grid', 'best'),
  [
    # Of 100 rows, 5 errors are the most with p <= 0.1 at epsilon 0.1, and 4 at
    # half of delta.
    (by_errors(0, 5, 6, 2), 1),
    (by_errors(0, 1, 2, 5), 3),
    (by_errors(50, 0, 0, 0), None),
    (by_errors(0, 5, 3, 9, 4, 2, groups=[0, 0, 0, 1, 1, 1]), 0),
    (by_errors(0, 4, 9, 1, 4, 9, groups=[0, 0, 0, 1, 1, 1]), 4),
    (by_errors(0, 1, 2, 5, cost=[1.0, 0.2, 0.3, 0.2]), 1),
  ],
)
def test_stops_at_the_first_failure_of_each_group(grid, best):
  found, bound = risk.choose(grid, 'harm', 'sequence', 0.1, 0.1)
  assert found == best
  level, expected = 0.1 / (1 + grid.groups[-1]), 0.0
  if best is not None:
    errors = int(grid.losses[:, best].sum())
    expected = scipy.stats.beta.ppf(1 - level, errors + 1, 100 - errors)
  assert bound == pytest.approx(expected)


def test_other_methods_by_hand():
  # (100 mean + 1) / 101 <= 0.1 for 9 errors, not for 10.
  grid = by_errors(0, 9, 10, 2)
  assert risk.choose(grid, 'harm', 'conformal', 0.1, 0.1) == (1, 0.1)
  # A fixed sequence stops at the second setting; it is not on the frontier.
  grid = by_errors(0, 90, 1, 50, rows=400, cost=[1.0, 0.9, 0.5, 0.4])
  grid = grid.take(np.random.default_rng(3).permutation(400))
  assert risk.choose(grid, 'harm', 'sequence', 0.1, 0.1)[0] == 0
  assert risk.choose(grid, 'harm', 'pareto', 0.1, 0.1)[0] == 2


def test_losses_by_hand():
  early = [[0.9, 0.1], [0.9, 0.1], [0.2, 0.8], [0.2, 0.8]]
  full = np.array([[0.8, 0.2], [0.1, 0.9], [0.7, 0.3], [0.1, 0.9]])
  chosen, labels = np.stack([full, np.array(early)]), np.array([0, 1, 1, 1])
  # Rows 1 and 2 change their answer: from right to wrong, and back.
  expected = {
    'disagreement': [0, 1, 1, 0],
    'harm': [0, 1, 0, 0],
    'accuracy': [0, 1, -1, 0],
    'brier': [0.01 - 0.04, 0.81 - 0.01, 0.04 - 0.49, 0.04 - 0.01],
    # epsilon for both negative, -epsilon for both positive, 1 else.
    'f1': [0.2, 1.0, 1.0, -0.2],
  }
  for name, of_early in expected.items():
    found = risk.losses(name, chosen, full, labels, 0.2)
    np.testing.assert_allclose(found[:, 1], of_early, err_msg=name)
  # F1 of [0, 0, 1, 1] for the answers [0, 1, 0, 1] is 1 / 2.
  half = risk.losses('f1', chosen, full, labels, 0.5)
  assert half[:, 1].mean() == pytest.approx(0.5)


def test_the_bound_of_f1_is_of_one_minus_f1():
  logits, labels = population(5000)
  grid = risk.build_grid([variant(logits)], labels, 'f1', 0.3)
  answers, rng = logits.argmax(-1), np.random.default_rng(0)
  whole, below, bounds = answers[-1], 0, []
  for _ in range(DRAWS):
    rows = rng.integers(5000, size=400)
    best, bound = risk.choose(grid.take(rows), 'f1', 'sequence', 0.3, DELTA)
    exits = Confidence(grid.thresholds[best]).first(logits)
    left = answers[exits, np.arange(5000)]
    losses = 1 - f1_score(whole, left)
    below += bound < losses
    bounds.append(bound - losses)
    mean = risk.mean_risk('f1', grid.losses[rows, best])
    assert mean == pytest.approx(1 - f1_score(whole[rows], left[rows]))
  assert below <= ALLOWED
  assert 0 < np.median(bounds) < 0.1  # not by being useless


@pytest.mark.parametrize('classes', [2, 3])
def test_a_grid_goes_from_safest_to_riskiest(classes):
  logits, labels = population(50, classes)
  models = [variant(logits), variant(logits[:, ::-1], 0.5, ratio=0.5)]
  grid = risk.build_grid(models, labels, 'harm', 0.1)
  count = risk.NUM_THRESHOLDS
  assert grid.losses.shape == (50, 2 * count)
  assert grid.groups.tolist() == [0] * count + [1] * count
  first = grid.thresholds[:count]
  assert first[[0, -1]] == pytest.approx([1.0, 1 / classes])
  assert (np.diff(first) < 0).all()
  # Full depth costs 3 of 3, the first head 1 of 3, of the second model half.
  means = grid.cost.mean(0)[[0, count - 1, -1]]
  assert means == pytest.approx([1.0, 1 / 3, 1 / 6])
  assert grid.early[[0, count - 1]].tolist() == [0.0, 1.0]
  # Models with one head are settings of one group.
  alone = [variant(logits[-1:]), variant(logits[:1], 0.5, ratio=0.5)]
  grid = risk.build_grid(alone, labels, 'harm', 0.1)
  assert grid.groups.tolist() == [0, 0]
  assert grid.variants.tolist() == [0, 1]
