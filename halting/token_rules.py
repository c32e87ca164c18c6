"""Rules that read a learned score; equation numbers as in Fojo's overview.

The arithmetic is float32.
"""

import dataclasses
from typing import Annotated, ClassVar

import jax.numpy as jnp
from annotated_types import Interval
from jaxtyping import Bool, Float

from halting.rule import Arrays, Halting, TokenRule, namespace, no_value

Epsilon = Annotated[float, Interval(ge=0.0, lt=1.0)]
EPSILONS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)  # of a sweep


@dataclasses.dataclass(frozen=True)
class Quantile(TokenRule):
  """Base of rules that halt an item when its scores reach `1 - epsilon`."""

  epsilon: Epsilon = 0.01

  def cheaper(self):
    """Returns the rule with larger epsilons."""
    larger = [epsilon for epsilon in EPSILONS if epsilon > self.epsilon]
    return tuple(dataclasses.replace(self, epsilon=e) for e in larger)

  def reached(self, total: Float[Arrays, '*S']) -> Bool[Arrays, '*S']:
    """Returns where a sum of scores ends the item."""
    return total >= 1.0 - self.epsilon


@dataclasses.dataclass(frozen=True)
class ACT(Quantile):
  """Adaptive computation time (Graves 2016), equations (4) to (9).

  `N = min{k : sum_{j<=k} p^j >= 1 - epsilon}`, at most the step limit, and `R =
  1 - sum_{j<N} p^j`. The states have the weights `p^1 .. p^{N-1}, R`. The cost
  is `N + R`. `total` sums the scores before the last step; `remainder` is R, 0
  until the item has halted.
  """

  MIXES: ClassVar[bool] = True

  def step(self, state, evidence, is_last):
    """See the base; the weights of an item sum to 1."""
    xp, score = namespace(evidence), evidence.astype('float32')
    rest = 1.0 - state.total
    halts = state.running & (self.reached(state.total + score) | is_last)
    goes_on = state.running & ~halts
    weight = xp.where(goes_on, score, xp.where(halts, rest, 0.0))
    after = Halting(
      total=state.total + xp.where(goes_on, score, 0.0),
      remainder=xp.where(halts, rest, state.remainder),
      steps=state.steps + state.running.astype('int32'),
      running=goes_on,
    )
    return after, weight


@dataclasses.dataclass(frozen=True)
class StraightThrough(Quantile):
  """Straight-through ACT, equations (10) to (19): the output is state N alone.

  The weight of step n is `f_b(h^n) = [h^n >= 1 - epsilon]`, with the derivative
  1 at every step up to N. The cost is `1 + sum_{j=1}^N (1 - f_b(h^j))`, which
  is N (equation (16) as printed gives N - 1), with the derivative -1 by each
  `h^j`. `total` is h, the sum of all scores plus the carried one; `remainder`
  has value 0 and the gradient of the cost.
  """

  def step(self, state, evidence, is_last):
    """See the base."""
    xp = namespace(evidence)
    total = state.total + evidence.astype('float32')
    halts = state.running & (self.reached(total) | is_last)
    slope = xp.where(state.running, no_value(total), 0.0)
    after = Halting(
      total=xp.where(state.running, total, state.total),
      remainder=state.remainder - slope,
      steps=state.steps + state.running.astype('int32'),
      running=state.running & ~halts,
    )
    return after, halts.astype('float32') + slope


@dataclasses.dataclass(frozen=True)
class SkipACT(StraightThrough):
  """Skip-ACT, equations (20) to (30): an input may be skipped, with N = 0.

  The excess over 1 of scores of up to mu is carried to the next input. The next
  state is `skip * s_{t-1} + (1 - skip) * s`, where s accumulates the steps from
  j = 1 (no `s^0` is defined).
  """

  # Largest score: an input can skip up to mu - 1 following inputs.
  mu: Annotated[int, Interval(ge=1, le=10_000)] = 1

  def step(self, state, evidence, is_last):
    """See the base."""
    return super().step(state, self.mu * evidence, is_last)

  def resume(self, valid, carried):
    """Returns (state, skip `f_b(h^0)`) for `carried` `h^0`, (24) to (29)."""
    skips = self.reached(carried)
    # The term j = 0 of the cost, `1 - f_b(h^0)`, has a derivative too.
    slope = namespace(carried).where(valid, no_value(carried), 0.0)
    begun = self.start(valid & ~skips).replace(total=carried, remainder=-slope)
    return begun, skips.astype('float32') + no_value(carried)

  def carry_over(self, state):
    """Returns `h^N - 1` (24); 0 after a forced halt."""
    left = state.total - 1.0
    return namespace(left).where(self.reached(state.total), left, 0.0)


@dataclasses.dataclass(frozen=True)
class PonderNet(Quantile):
  """Halts at a quantile of the distribution over steps (Banino et al. 2021).

  The score is lambda_n, the probability to halt in step n if it runs, and
  `total` that of having halted. The quantile is `1 - epsilon` (the Q-exit of
  PALBERT, Balagansky and Gavrilov 2022), by default the median.
  """

  KEEPS_STATE: ClassVar[bool] = False
  PER_ROW: ClassVar[bool] = True
  EVERY_STEP: ClassVar[bool] = True
  epsilon: Epsilon = 0.5

  def step(self, state, evidence, is_last):
    """See the base; the weight is 1 in the step that halts."""
    xp, score = namespace(evidence), evidence.astype('float32')
    total = state.total + (1.0 - state.total) * score
    halts = state.running & (self.reached(total) | is_last)
    after = state.replace(
      total=xp.where(state.running, total, state.total),
      steps=state.steps + state.running.astype('int32'),
      running=state.running & ~halts,
    )
    return after, halts.astype('float32')

  def distribution(self, scores):
    """Returns `lambda_n prod_{j<n} (1 - lambda_j)`; the last lambda is 1."""
    lambdas = scores.astype(jnp.float32).at[-1].set(1.0)
    survived = jnp.cumprod(1.0 - lambdas, axis=0)
    before = jnp.concatenate([jnp.ones_like(survived[:1]), survived[:-1]])
    return lambdas * before


@dataclasses.dataclass(frozen=True)
class Threshold(TokenRule):
  """Stops when the sum reaches tau, or in the step that would take it past tau.

  That step weighs 0 and is not in `total` (AdaTape, Algorithm 2).
  """

  COMBINATION: ClassVar[str] = 'last'
  KEEPS_STATE: ClassVar[bool] = False
  tau: Annotated[float, Interval(gt=0.0)] = 1.0

  def step(self, state, evidence, is_last):
    """See the base."""
    xp = namespace(evidence)
    reached = state.total + evidence
    counts = state.running & (reached <= self.tau)
    total = xp.where(counts, reached, state.total)
    after = state.replace(
      total=total,
      steps=state.steps + state.running.astype('int32'),
      running=counts & (total < self.tau) & xp.logical_not(is_last),
    )
    return after, counts.astype('float32')


@dataclasses.dataclass(frozen=True)
class Fixed(TokenRule):
  """All steps for every item, without a score."""

  SCORED: ClassVar[bool] = False
  COMBINATION: ClassVar[str] = 'last'
  KEEPS_STATE: ClassVar[bool] = False

  def step(self, state, evidence, is_last):
    """See the base; `evidence` is not read."""
    halts = state.running & is_last
    steps = state.steps + state.running.astype('int32')
    after = state.replace(steps=steps, running=state.running & ~halts)
    return after, halts.astype('float32')
