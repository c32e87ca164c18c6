"""Settings of Adaptive Tape Reading, and what perturbs it in training.

The two tricks of appendix A.7 that stabilise a learnable bank are drawn per
row from the row's own key, so a row's noise does not depend on the batch it
is in.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

QUERY_UPDATES = ('average', 'replace')
LOSSES = ('entropy', 'max')


@dataclasses.dataclass(frozen=True)
class Reading:
  """Settings of Adaptive Tape Reading; illegal ones raise ValueError.

  Attributes:
    tokens_per_step: bank tokens merged into one tape token, K >= 1. The paper
      takes K = max_steps / threshold.
    max_steps: most tape tokens of a row, T >= 1.
    threshold: halting threshold tau > 0. With infinity the length is fixed:
      the T best tokens are read at once and appended as they are (the paper's
      ablation without adaptive length, Table 2), whatever K is.
    query_dim: leading features of query and bank that are compared, h >= 1.
    query_update: 'average' of query and tape token, or 'replace' by the token.
    loss: what a step adds, 'entropy' (1 - sum w^2) or 'max' (1 - max w).
  """

  tokens_per_step: int
  max_steps: int
  threshold: int | float
  query_dim: int
  query_update: str = 'average'
  loss: str = 'entropy'

  def __post_init__(self):
    for name in ('tokens_per_step', 'max_steps', 'query_dim'):
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f'{name}: expected an integer >= 1, got {value!r}')
    if not self.threshold > 0:
      raise ValueError(f'threshold: expected > 0, got {self.threshold!r}')
    for name, legal in (('query_update', QUERY_UPDATES), ('loss', LOSSES)):
      value = getattr(self, name)
      if value not in legal:
        raise ValueError(f'{name}: expected one of {legal}, got {value!r}')

  @property
  def fixed_length(self) -> bool:
    """Whether every row reads exactly `max_steps` tokens."""
    return math.isinf(self.threshold)

  @property
  def picks_per_step(self) -> int:
    """Bank tokens behind one tape token: K, or 1 at fixed length."""
    return 1 if self.fixed_length else self.tokens_per_step

  @property
  def min_bank_size(self) -> int:
    """The most bank tokens that one row can read, K * T."""
    return self.picks_per_step * self.max_steps

  def check_bank(self, bank_size: int, width: int) -> None:
    """Raises ValueError unless the bank has enough tokens and features."""
    if bank_size < self.min_bank_size:
      raise ValueError(
        f'bank_size: expected at least {self.picks_per_step} (tokens_per_step) '
        f'* {self.max_steps} (max_steps) = {self.min_bank_size} tokens, got '
        f'{bank_size}; enlarge the bank or lower one of the two'
      )
    if self.query_dim > width:
      raise ValueError(
        f'query_dim: expected at most the width {width}, got {self.query_dim}'
      )


def query_noise(
  row_keys: Key[Array, ' B'], query: Float[Array, 'B H'], scale: float
) -> Float[Array, 'B H']:
  """Adds normal noise of the given scale to the queries (A.7: 0.01)."""
  noise = jax.vmap(
    lambda key: jax.random.normal(key, query.shape[1:], query.dtype)
  )(row_keys)
  return query + scale * noise


def bank_drop(
  row_keys: Key[Array, ' B'], rate: float, bank_size: int, keep: int
) -> Bool[Array, 'B C']:
  """Which bank tokens each row must not read, Bernoulli (A.7: rate 0.1).

  Args:
    row_keys: one key per row.
    rate: probability that a token is dropped.
    bank_size: number of tokens in the bank, C.
    keep: tokens that every row keeps, K * T; drops beyond that are undone.
  """
  dropped = jax.vmap(lambda key: jax.random.bernoulli(key, rate, (bank_size,)))(
    row_keys
  )
  return dropped & (jnp.cumsum(dropped, axis=1) <= bank_size - keep)
