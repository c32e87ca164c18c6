"""Exit rules against a plain loop over rows and heads."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import entr, softmax

from eat import exits
from eat.exits import Rule

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
arrays = pytest.mark.parametrize('as_array', [np.asarray, jnp.asarray])


def check(rule, logits, as_array):
  for count in range(1, E + 1):
    want = [leaves(rule, logits[:count], row) for row in range(B)]
    got = exits.should_exit(rule, as_array(logits[:count]))
    assert got.dtype == bool
    assert got.tolist() == want
    assert isinstance(got, jax.Array) == (as_array is jnp.asarray)
    heads = [as_array(head) for head in logits[:count]]
    assert exits.should_exit(rule, heads).tolist() == want
  first = [
    next((e for e in range(E) if leaves(rule, logits[: e + 1], row)), E - 1)
    for row in range(B)
  ]
  got = exits.first_exit(rule, as_array(logits))
  assert got.tolist() == first
  assert got.dtype == np.int32
  return first


@arrays
@pytest.mark.parametrize('classes', [2, 3])
@pytest.mark.parametrize('rule', RULES, ids=lambda rule: rule.name)
def test_rules_equal_a_plain_loop(rule, classes, as_array):
  first = check(rule, random_logits(classes), as_array)
  unmet = rule.tau is not None and np.all(np.isinf(rule.tau))
  if rule.name == 'never' or unmet or rule.patience >= E:
    assert set(first) == {E - 1}
  elif rule == Rule('patience', patience=1):
    assert set(first) == {0}
  else:
    assert len(set(first)) > 1  # Else the test could not fail.


@arrays
@pytest.mark.parametrize('rule', OF_REGRESSIONS)
def test_regression_equals_a_plain_loop(rule, as_array):
  first = check(rule, random_logits(1), as_array)
  assert 0 not in first  # One prediction has nothing to agree with.
  assert rule.name == 'never' or len(set(first)) > 1


def test_under_jit_with_traced_thresholds():
  logits = random_logits(3)

  @jax.jit
  def run(logits, tau):
    return exits.first_exit(Rule('confidence', tau), logits)

  for tau in (jnp.float32(0.6), jnp.float32(0.8), jnp.asarray(PER_ROW, 'f')):
    want = exits.first_exit(Rule('confidence', np.asarray(tau)), logits)
    np.testing.assert_array_equal(run(jnp.asarray(logits), tau), want)


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


@arrays
@pytest.mark.parametrize('bad', [np.nan, np.inf])
@pytest.mark.parametrize('classes', [1, 3])
def test_logits_that_are_not_finite_stay(as_array, bad, classes):
  logits = np.zeros((E, 2, classes), np.float32)
  logits[:, 0, 0] = 9.0
  logits[:, 1] = bad
  rules = [Rule('confidence', 0.0), Rule('entropy', 9.0), Rule('margin', 0.0)]
  for rule in (*rules, Rule('patience'), Rule('combined', 0.0)):
    got = exits.should_exit(rule, as_array(logits))
    assert got.tolist() == [True, False]


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
def test_half_precision_is_decided_in_float32(dtype):
  logits = jnp.asarray(random_logits(3), dtype)
  wide = np.asarray(logits, np.float32)
  for given in (logits, np.asarray(logits)):
    got = exits.first_exit(Rule('confidence', 0.8), given)
    want = exits.first_exit(Rule('confidence', 0.8), wide)
    np.testing.assert_array_equal(got, want)


@arrays
def test_probabilities_use_the_temperature_of_each_head(as_array):
  logits, temperatures = random_logits(3), np.array([0.5, 1.0, 2.0, 3.5])
  got = exits.probabilities(as_array(logits), temperatures)
  want = softmax(np.float64(logits) / temperatures[:, None, None], -1)
  np.testing.assert_allclose(got, want, atol=1e-6)
  scaled = exits.calibrate(as_array(logits), temperatures)
  same = exits.probabilities(scaled, [1.0] * E)
  np.testing.assert_allclose(same, got, atol=1e-6)
  first = exits.first_exit(Rule('confidence', 0.8), scaled)
  confident = np.asarray(got).max(-1) >= 0.8
  confident[-1] = True
  np.testing.assert_array_equal(first, confident.argmax(0))


@pytest.mark.parametrize(
  ('classes', 'temperatures', 'message'),
  [
    (2, [1.0, 1.0], 'temperatures: expected 4, one for each head, got 2'),
    (2, [1.0, 0.0, 1.0, 1.0], 'temperatures: expected finite numbers > 0'),
    (2, [1.0, math.nan, 1.0, 1.0], 'temperatures: expected finite numbers'),
    (2, [1.0, math.inf, 1.0, 1.0], 'temperatures: expected finite numbers'),
    (1, [1.0] * E, 'logits: expected at least 2 classes'),
  ],
)
def test_probabilities_that_cannot_be(classes, temperatures, message):
  with pytest.raises(ValueError, match=message):
    exits.probabilities(random_logits(classes), temperatures)


@pytest.mark.parametrize(
  ('name', 'fields', 'message'),
  [
    ('certainty', {}, r"name: expected one of \('confidence'.*'certainty'"),
    ('confidence', {}, r'tau: expected a probability in \[0, 1\].*got None'),
    ('confidence', {'tau': 1.5}, r'tau: .*\[0, 1\].*got 1.5'),
    ('confidence', {'tau': math.nan}, r'tau: .*got nan'),
    ('confidence', {'tau': '0.9'}, r"tau: .*got '0.9'"),
    ('confidence', {'tau': True}, r'tau: .*got True'),
    ('combined', {'tau': -0.1}, r'tau: .*got -0.1'),
    ('margin', {'tau': np.array([0.5, -1])}, r'tau: .*got array'),
    ('margin', {'tau': np.zeros((2, 2))}, r'tau: .*got array'),
    ('entropy', {'tau': -0.1}, r'tau: expected nats >= 0.*got -0.1'),
    ('patience', {'patience': 0}, r'patience: .*integer >= 1, got 0'),
    ('patience', {'patience': 2.0}, r'patience: .*integer >= 1, got 2.0'),
    ('patience', {'patience': True}, r'patience: .*integer >= 1, got True'),
    ('never', {'tolerance': -1.0}, r'tolerance: .*number >= 0, got -1.0'),
    ('never', {'veto_margin': 1.1}, r'veto_margin: .*\[0, 1\], got 1.1'),
    ('never', {'veto_margin': 'low'}, r"veto_margin: .*got 'low'"),
  ],
)
def test_illegal_rules(name, fields, message):
  with pytest.raises(ValueError, match=message):
    Rule(name, **fields)


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
