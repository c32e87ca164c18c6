"""Settings of Adaptive Tape Reading and its noise in training.

Query noise and bank drop (appendix A.7) stabilise a learnable bank. Both are
drawn per row from the row's own key.

The second loss that Algorithm 2 prints (line 14, `l += hp`) is no option: with
largest weights u_1 .. u_m it is `sum_j (m - j + 1) u_j`, so its gradient by
every u_j is positive. Descent lowers them to 1 / K, where the tape is longest.
"""

import dataclasses
import math

import jax
from jaxtyping import Array, Bool, Float, Key

from core.errors import ConfigError, check_option
from halting.token_rules import Threshold
from model_lib.logical import over_rows


@dataclasses.dataclass(frozen=True)
class Reading:
  """Settings of Adaptive Tape Reading; illegal ones raise ConfigError."""

  # Bank tokens merged into one tape token, K (the paper uses K = T / tau).
  tokens_per_step: int
  max_steps: int  # most tape tokens of a row, T
  # Halting threshold tau. Infinity disables halting: the top T tokens are
  # appended unmerged, for any K (ablation of Table 2).
  threshold: int | float
  query_dim: int  # number of leading features used for scores, h
  # 'average' the query and the tape token, or 'replace' the query by the token.
  query_update: str = 'average'
  loss: str = 'entropy'  # loss of one step: 1 - sum w^2, or 'max': 1 - max w

  def __post_init__(self):
    for name in ('tokens_per_step', 'max_steps', 'query_dim'):
      if (value := getattr(self, name)) < 1:
        raise ConfigError(name, value, 'an integer >= 1')
    if not self.threshold > 0:
      raise ConfigError('threshold', self.threshold, '> 0')
    check_option('query_update', self.query_update, ('average', 'replace'))
    check_option('loss', self.loss, ('entropy', 'max'))

  @property
  def fixed_length(self) -> bool:
    """True if every row reads exactly `max_steps` tokens."""
    return math.isinf(self.threshold)

  @property
  def rule(self) -> Threshold:
    """Halts a row by the largest weight of each step; not at fixed length."""
    return Threshold(self.threshold)

  @property
  def picks_per_step(self) -> int:
    """Bank tokens merged into one tape token: K, or 1 at fixed length."""
    return 1 if self.fixed_length else self.tokens_per_step

  @property
  def min_bank_size(self) -> int:
    """Smallest legal bank: the most tokens that a row can read, K * T."""
    return self.picks_per_step * self.max_steps

  def check_bank(self, bank_size: int | None, width: int) -> None:
    """Raises ConfigError unless the bank has enough tokens and features.

    `bank_size` is None if it depends on the input.
    """
    if bank_size is not None and bank_size < self.min_bank_size:
      kind = 'fixed length' if self.fixed_length else 'tokens_per_step'
      picks = f'{self.picks_per_step} ({kind}) * {self.max_steps} (max_steps)'
      expected = (
        f'at least {picks} = {self.min_bank_size} tokens (of an input bank: '
        'patches of bank_patch_size, or symbols)'
      )
      raise ConfigError('bank_size', bank_size, expected)
    if self.query_dim > width:
      expected = f'at most the width {width}'
      raise ConfigError('query_dim', self.query_dim, expected)


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
  """Draws the bank tokens hidden from each row, Bernoulli (A.7: rate 0.1).

  Every row keeps `keep` tokens, uniformly drawn if more would be dropped.
  """
  draws = jax.vmap(lambda key: jax.random.uniform(key, (bank_size,)))(row_keys)

  def smallest_kept(draws: Array) -> Array:
    # Not the last column: XLA would sort all draws, 13 times as slow on a CPU.
    return jax.lax.top_k(draws, keep)[0].min(-1, keepdims=True)

  kept = over_rows(smallest_kept, draws.shape[0], (True,))(draws)
  return (draws < rate) & (draws < kept)
