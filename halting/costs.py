"""Costs of a distribution over steps: its mean, and a distance from a prior.

PonderNet, Banino et al. 2021. Arrays are float32 `[N, ...]`.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def geometric_log_prior(rate: float, max_steps: int) -> Float[Array, ' N']:
  """Returns the log of the geometric distribution truncated at `max_steps`.

  `rate` is lambda_p, in (0, 1); the mean is about 1 / rate.
  """
  steps = jnp.arange(max_steps, dtype=jnp.float32)
  return jax.nn.log_softmax(steps * math.log1p(-rate))


def divergence(
  steps: Float[Array, 'N ...'], log_prior: Float[Array, ' N']
) -> Float[Array, '...']:
  """Returns `KL(p || prior)` in nats; a step of probability 0 adds 0."""
  shape = (-1,) + (1,) * (steps.ndim - 1)
  positive = steps > 0.0
  # Use where before log as well, or the gradient would be NaN.
  safe = jnp.where(positive, steps, 1.0)
  ratio = jnp.log(safe) - log_prior.reshape(shape)
  return jnp.where(positive, steps * ratio, 0.0).sum(0)


def expected_steps(steps: Float[Array, 'N ...']) -> Float[Array, '...']:
  """Returns the mean number of steps, `sum_n n p_n`."""
  shape = (-1,) + (1,) * (steps.ndim - 1)
  numbers = jnp.arange(1, steps.shape[0] + 1, dtype=jnp.float32)
  return (steps * numbers.reshape(shape)).sum(0)
