"""Exit rules against a plain loop over rows and heads."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import entr, softmax

from halting.row_rules import (
  Combined,
  Confidence,
  Entropy,
  Margin,
  Never,
  Patience,
  Tolerance,
)
from halting.rule import weigh

E, B = 4, 64


def leaves(rule, heads, row):
  """Decides for one row after the given heads; thresholds may be by row."""
  tau, veto_margin, tolerance = (
    np.broadcast_to(getattr(rule, name, 0.0), B)[row]
    for name in ('tau', 'veto_margin', 'tolerance')
  )
  logits = np.float64([head[row] for head in heads])
  if isinstance(rule, Never):
    return False
  if isinstance(rule, Tolerance):
    count = max(2, rule.patience)
    steps = np.abs(np.diff(logits[-count:, 0]))
    return len(logits) >= count and all(steps < tolerance)
  shares = softmax(logits[-1])
  second, best = sorted(shares)[-2:]
  others = np.flatnonzero(logits.argmax(-1) != logits[-1].argmax())
  agreed = len(logits) - 1 - max(others, default=-1)
  if isinstance(rule, Patience):
    sure = agreed >= rule.patience
  elif isinstance(rule, Entropy):
    sure = entr(shares).sum() <= tau
  elif isinstance(rule, Margin):
    sure = best - second >= tau
  else:
    sure = best >= tau and agreed >= getattr(rule, 'patience', 1)
  return sure and best - second >= veto_margin


def random_logits(classes, seed=0, scale=1.5):
  generator = np.random.default_rng(seed)
  # Heads of a row resemble each other.
  common = generator.normal(size=(1, B, classes))
  noise = generator.normal(size=(E, B, classes))
  return (scale * (common + 0.5 * noise)).astype(np.float32)


PER_ROW = np.random.default_rng(9).uniform(0.3, 0.95, B)
RULES = [
  Confidence(0.8), Confidence(PER_ROW), Confidence(0.6, veto_margin=0.5),
  Confidence(0.5, veto_margin=PER_ROW), Confidence(math.inf),
  Entropy(0.4), Entropy(PER_ROW), Entropy(0.6, veto_margin=0.4),
  Entropy(-math.inf), Margin(0.5), Margin(PER_ROW),
  Patience(1), Patience(), Patience(3), Patience(4, veto_margin=0.2),
  Patience(9), Combined(0.7), Combined(PER_ROW, 3, veto_margin=0.3), Never(),
]  # fmt: skip
OF_REGRESSIONS = [
  Tolerance(0.4, 1), Tolerance(0.4, 2), Tolerance(0.9, 3), Tolerance(PER_ROW),
  Never(),
]  # fmt: skip


def unmet(rule):
  return isinstance(rule, Never) or np.all(np.isinf(getattr(rule, 'tau', 0)))


def check(rule, logits):
  for count in range(1, E + 1):
    want = [leaves(rule, logits[:count], row) for row in range(B)]
    got = rule.leaves_at(logits[:count])
    assert got.dtype == bool
    assert got.tolist() == want
  first = [
    next((e for e in range(E) if leaves(rule, logits[: e + 1], row)), E - 1)
    for row in range(B)
  ]
  assert rule.first(logits).tolist() == first
  return first


@pytest.mark.parametrize(
  ('rule', 'classes'),
  [*itertools.product(RULES, (2, 3)), *itertools.product(OF_REGRESSIONS, (1,))],
)
def test_rules_equal_a_plain_loop(rule, classes):
  first = check(rule, random_logits(classes))
  if unmet(rule) or getattr(rule, 'patience', 1) >= E:
    assert set(first) == {E - 1}
  elif rule == Patience(1):
    assert set(first) == {0}
  else:
    assert len(set(first)) > 1  # Else the test could not fail.
  # One prediction of a regression has nothing to agree with.
  assert classes > 1 or 0 not in first


@pytest.mark.parametrize(
  ('rule', 'logits', 'want'),
  [
    # A threshold that is met exactly.
    (Confidence(0.5), [[0, 0]], True),
    (Margin(0.0), [[0, 0]], True),
    (Tolerance(0.5), [[1.0], [1.5]], False),
    # -sum p ln p = 0.80182 nats.
    (Entropy(0.8017), np.log([[0.7, 0.2, 0.1]]), False),
    (Entropy(0.8019), np.log([[0.7, 0.2, 0.1]]), True),
    # Large logits do not overflow.
    (Confidence(0.9), [[2e4, 0]], True),
    (Confidence(0.9), [[-2e4, -2e4]], False),
    (Entropy(0.1), [[2e4, 0]], True),
    (Entropy(0.1), [[-2e4, -2e4]], False),
  ],
)
def test_by_hand(rule, logits, want):
  heads = np.array(logits, np.float32)[:, None]
  assert rule.leaves_at(heads).tolist() == [want]


@pytest.mark.parametrize('bad', [np.nan, np.inf])
@pytest.mark.parametrize('classes', [1, 3])
def test_logits_that_are_not_finite_stay(bad, classes):
  logits = np.zeros((E, 2, classes), np.float32)
  logits[:, 0, 0] = 9.0
  logits[:, 1] = bad
  sure = Confidence(0.0), Entropy(9.0), Margin(0.0), Patience(), Combined(0.0)
  for rule in sure if classes > 1 else [Tolerance()]:
    assert rule.leaves_at(logits).tolist() == [True, False]


ALL = [*[(rule, 3) for rule in RULES], *[(rule, 1) for rule in OF_REGRESSIONS]]


@pytest.mark.parametrize(('rule', 'classes'), ALL)
def test_jax_decides_as_numpy(rule, classes):
  logits = random_logits(classes)
  state, weights = weigh(rule, jnp.asarray(logits), jnp.ones(B, bool))
  np.testing.assert_array_equal(state.steps - 1, rule.first(logits))
  np.testing.assert_array_equal(weights.argmax(0), rule.first(logits))
  assert not state.running.any()


@pytest.mark.parametrize(('rule', 'classes'), ALL)
def test_heads_needed_are_those_of_a_row_that_is_always_sure(rule, classes):
  certain = np.zeros((12, B, classes), np.float32)
  certain[..., 0] = 50.0
  left = [rule.leaves_at(certain[:count]).any() for count in range(1, 13)]
  needed = rule.heads_needed
  if unmet(rule):
    assert not any(left)
  else:
    assert left == [False] * (needed - 1) + [True] * (13 - needed)


def test_names_and_values_of_a_sweep():
  assert [str(Patience(value)) for value in Patience.sweep(2, 2)] == [
    'patience=1', 'patience=2'
  ]  # fmt: skip
  assert str(Never()) == 'never'
