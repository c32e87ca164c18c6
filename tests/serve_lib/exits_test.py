"""Exit rules against a plain loop over rows and heads."""

import itertools
import math

import numpy as np
import pytest
from scipy.special import entr, softmax

from serve_lib import exits
from serve_lib.exits import Rule

E, B = 4, 64


def leaves(rule, heads, row):
  """Decides for one row after the given heads; thresholds may be by row."""
  tau, veto_margin, tolerance = (
    np.broadcast_to(value, B)[row]
    for value in (rule.tau, rule.veto_margin, rule.tolerance)
  )
  logits = np.float64([head[row] for head in heads])
  if rule.name == 'never':
    return False
  if logits.shape[1] == 1:
    count = max(2, rule.patience)
    steps = np.abs(np.diff(logits[-count:, 0]))
    return len(logits) >= count and all(steps < tolerance)
  shares = softmax(logits[-1])
  second, best = sorted(shares)[-2:]
  others = np.flatnonzero(logits.argmax(-1) != logits[-1].argmax())
  agreed = len(logits) - 1 - max(others, default=-1)
  if rule.name == 'patience':
    sure = agreed >= rule.patience
  elif rule.name == 'entropy':
    sure = entr(shares).sum() <= tau
  elif rule.name == 'margin':
    sure = best - second >= tau
  else:
    patience = rule.patience if rule.name == 'combined' else 1
    sure = best >= tau and agreed >= patience
  return sure and best - second >= veto_margin


def random_logits(classes, seed=0, scale=1.5):
  generator = np.random.default_rng(seed)
  # Heads of a row resemble each other.
  common = generator.normal(size=(1, B, classes))
  noise = generator.normal(size=(E, B, classes))
  return (scale * (common + 0.5 * noise)).astype(np.float32)


PER_ROW = np.random.default_rng(9).uniform(0.3, 0.95, B)
RULES = [
  Rule('confidence', 0.8), Rule('confidence', PER_ROW),
  Rule('confidence', 0.6, veto_margin=0.5),
  Rule('confidence', 0.5, veto_margin=PER_ROW), Rule('confidence', math.inf),
  Rule('entropy', 0.4), Rule('entropy', PER_ROW),
  Rule('entropy', 0.6, veto_margin=0.4), Rule('entropy', -math.inf),
  Rule('margin', 0.5), Rule('margin', PER_ROW),
  Rule('patience', patience=1), Rule('patience'), Rule('patience', patience=3),
  Rule('patience', patience=4, veto_margin=0.2), Rule('patience', patience=9),
  Rule('combined', 0.7),
  Rule('combined', PER_ROW, patience=3, veto_margin=0.3),
  Rule('never'),
]  # fmt: skip
OF_REGRESSIONS = [
  Rule('patience', patience=1, tolerance=0.4),
  Rule('patience', patience=2, tolerance=0.4),
  Rule('patience', patience=3, tolerance=0.9),
  Rule('confidence', 0.1, tolerance=0.4),
  Rule('entropy', 0.1, tolerance=PER_ROW),
  Rule('never', tolerance=9.0),
]


def check(rule, logits):
  for count in range(1, E + 1):
    want = [leaves(rule, logits[:count], row) for row in range(B)]
    got = exits.should_exit(rule, logits[:count])
    assert got.dtype == bool
    assert got.tolist() == want
  first = [
    next((e for e in range(E) if leaves(rule, logits[: e + 1], row)), E - 1)
    for row in range(B)
  ]
  assert exits.first_exit(rule, logits).tolist() == first
  return first


@pytest.mark.parametrize(
  ('rule', 'classes'),
  [*itertools.product(RULES, (2, 3)), *itertools.product(OF_REGRESSIONS, (1,))],
)
def test_rules_equal_a_plain_loop(rule, classes):
  first = check(rule, random_logits(classes))
  unmet = rule.tau is not None and np.all(np.isinf(rule.tau))
  if rule.name == 'never' or unmet or rule.patience >= E:
    assert set(first) == {E - 1}
  elif rule == Rule('patience', patience=1):
    assert set(first) == {0}
  else:
    assert len(set(first)) > 1  # Else the test could not fail.
  # One prediction of a regression has nothing to agree with.
  assert classes > 1 or 0 not in first


@pytest.mark.parametrize(
  ('rule', 'logits', 'want'),
  [
    # A threshold that is met exactly.
    (Rule('confidence', 0.5), [[0, 0]], True),
    (Rule('margin', 0.0), [[0, 0]], True),
    (Rule('patience', tolerance=0.5), [[1.0], [1.5]], False),
    # -sum p ln p = 0.80182 nats.
    (Rule('entropy', 0.8017), np.log([[0.7, 0.2, 0.1]]), False),
    (Rule('entropy', 0.8019), np.log([[0.7, 0.2, 0.1]]), True),
    # Large logits do not overflow.
    (Rule('confidence', 0.9), [[2e4, 0]], True),
    (Rule('confidence', 0.9), [[-2e4, -2e4]], False),
    (Rule('entropy', 0.1), [[2e4, 0]], True),
    (Rule('entropy', 0.1), [[-2e4, -2e4]], False),
  ],
)
def test_by_hand(rule, logits, want):
  heads = np.array(logits, np.float32)[:, None]
  assert exits.should_exit(rule, heads).tolist() == [want]


@pytest.mark.parametrize('bad', [np.nan, np.inf])
@pytest.mark.parametrize('classes', [1, 3])
def test_logits_that_are_not_finite_stay(bad, classes):
  logits = np.zeros((E, 2, classes), np.float32)
  logits[:, 0, 0] = 9.0
  logits[:, 1] = bad
  rules = [Rule('confidence', 0.0), Rule('entropy', 9.0), Rule('margin', 0.0)]
  for rule in (*rules, Rule('patience'), Rule('combined', 0.0)):
    assert exits.should_exit(rule, logits).tolist() == [True, False]


def test_an_unknown_rule_is_named():
  with pytest.raises(ValueError, match=r"name: expected one of .*'certainty'"):
    Rule('certainty')


@pytest.mark.parametrize('classes', [1, 3])
@pytest.mark.parametrize('rule', RULES)
def test_heads_needed_are_those_of_a_row_that_is_always_sure(rule, classes):
  certain = np.zeros((12, B, classes), np.float32)
  certain[..., 0] = 50.0
  left = [
    exits.should_exit(rule, certain[:count]).any() for count in range(1, 13)
  ]
  needed = exits.heads_needed(rule, classes == 1)
  unmet = rule.tau is not None and np.all(np.isinf(rule.tau))
  if needed is None or (classes > 1 and unmet):
    assert not any(left)
  else:
    assert left == [False] * (needed - 1) + [True] * (13 - needed)
