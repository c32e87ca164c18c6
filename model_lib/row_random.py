"""Randomness per row of a batch, by a key of each row.

Noise depends neither on the other rows nor on the number of micro-batches.
"""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from core.errors import ConfigError

RowKeys = Key[Array, ' B'] | None  # None without noise, as in evaluation


def fold_rows(row_keys: RowKeys, use: str | int | Int[Array, '']) -> Any:
  """Returns the keys for one use: a name, or a number such as a loop's step."""
  if row_keys is None:
    return None
  number = zlib.crc32(use.encode()) if isinstance(use, str) else use
  return jax.vmap(lambda key: jax.random.fold_in(key, number))(row_keys)


def drop(
  x: Float[Array, 'B ...'], rate: float, row_keys: RowKeys, use: str
) -> Float[Array, 'B ...']:
  """Zeroes elements with probability `rate` and scales up the others.

  Raises ConfigError unless `rate` is in [0, 1). The keys are folded for `use`;
  without keys the result is `x`.
  """
  if not 0.0 <= rate < 1.0:
    raise ConfigError('dropout', rate, 'a rate in [0, 1)')
  if row_keys is None or rate == 0.0:
    return x
  keep = jax.vmap(
    lambda key: jax.random.bernoulli(key, 1.0 - rate, x.shape[1:])
  )(fold_rows(row_keys, use))
  return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
