"""PonderNet: halting as a distribution over steps (Banino et al. 2021).

`lambda_n` is the probability to halt in step n if the item has not halted
before; `p_n = lambda_n prod_{j<n} (1 - lambda_j)`, with `lambda_N = 1` at the
step limit N. Arrays are float32 `[N, ...]`, as `ponder` stacks its trace.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from model_lib.halting import Halting


def halting_distribution(
  lambdas: Float[Array, 'N ...'],
) -> Float[Array, 'N ...']:
  """Returns `p_n` of each step (equation 1); the last lambda counts as 1."""
  lambdas = lambdas.astype(jnp.float32).at[-1].set(1.0)
  survived = jnp.cumprod(1.0 - lambdas, axis=0)
  before = jnp.concatenate([jnp.ones_like(survived[:1]), survived[:-1]])
  return lambdas * before


def geometric_log_prior(rate: float, max_steps: int) -> Float[Array, ' N']:
  """Returns the log of the geometric distribution truncated at `max_steps`.

  `rate` is lambda_p, in (0, 1); the mean is about 1 / rate.
  """
  steps = jnp.arange(max_steps, dtype=jnp.float32)
  return jax.nn.log_softmax(steps * math.log1p(-rate))


def divergence(
  distribution: Float[Array, 'N ...'], log_prior: Float[Array, ' N']
) -> Float[Array, '...']:
  """Returns `KL(p || prior)` in nats; a step of probability 0 adds 0."""
  shape = (-1,) + (1,) * (distribution.ndim - 1)
  positive = distribution > 0.0
  # Use where before log as well, or the gradient would be NaN.
  safe = jnp.where(positive, distribution, 1.0)
  ratio = jnp.log(safe) - log_prior.reshape(shape)
  return jnp.where(positive, distribution * ratio, 0.0).sum(0)


def ponder_loss(
  distribution: Float[Array, 'N ...'],
  losses: Float[Array, 'N ...'],
  log_prior: Float[Array, ' N'],
  beta: float | Float[Array, ''],
) -> Float[Array, '...']:
  """Returns `sum_n p_n L_n + beta KL(p || prior)` (equation 2)."""
  expected = (distribution * losses.astype(jnp.float32)).sum(0)
  return expected + beta * divergence(distribution, log_prior)


def expected_steps(distribution: Float[Array, 'N ...']) -> Float[Array, '...']:
  """Returns the mean number of steps, `sum_n n p_n`."""
  shape = (-1,) + (1,) * (distribution.ndim - 1)
  numbers = jnp.arange(1, distribution.shape[0] + 1, dtype=jnp.float32)
  return (distribution * numbers.reshape(shape)).sum(0)


def advance_median(
  halting: Halting, score: Float[Array, '...'], is_last: Array | bool
) -> tuple[Halting, Float[Array, '...']]:
  """Halts in the median step of the distribution: a `halting.Rule`.

  That is the first step where `sum_{j<=n} p_j >= 1/2`; `score` is lambda_n,
  `halting.total` the probability of having halted. The weight is 1 where an
  item halts.
  """
  halted = halting.total + (1.0 - halting.total) * score
  halts = halting.running & ((halted >= 0.5) | is_last)
  after = Halting(
    total=jnp.where(halting.running, halted, halting.total),
    remainder=halting.remainder,
    steps=halting.steps + halting.running.astype(jnp.int32),
    running=halting.running & ~halts,
  )
  return after, halts.astype(jnp.float32)
