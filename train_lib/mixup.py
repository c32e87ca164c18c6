"""Mixup (Zhang et al., 2017) of pairs of rows: 0 with 1, 2 with 3, ...

A train step keeps a pair on its device and in its micro-batch, so mixing needs
no communication and does not depend on devices, hosts or micro-batches.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jaxtyping import Array, Float, Float32, Key, Shaped

from model_lib import row_random
from train_lib.terms import Batch, Targets

PAIR = 2  # rows
_QUANTILES = 4096


def mix(
  batch: Batch, key: str, row_keys: Key[Array, ' B'], alpha: float
) -> tuple[Batch, Targets]:
  """Returns the batch, `batch[key]` `[B, H, W, E]` mixed, and its targets."""
  share = shares(row_keys, batch['mask'], alpha)
  weight, images = share[:, None, None, None], batch[key]
  mixed = weight * images + (1.0 - weight) * partners(images)
  other = {**batch, 'label': partners(batch['label'])}
  return {**batch, key: mixed}, ((share, batch), (1.0 - share, other))


def partners(x: Shaped[Array, 'B ...']) -> Shaped[Array, 'B ...']:
  """Returns rows 1, 0, 3, 2, ... of an array with an even number of rows."""
  return x.reshape(-1, PAIR, *x.shape[1:])[:, ::-1].reshape(x.shape)


def shares(
  row_keys: Key[Array, ' B'], mask: Float[Array, ' B'], alpha: float
) -> Float[Array, ' B']:
  """Returns the share of each row in its own mix, float32 in [1/2, 1].

  max(s, 1 - s) of s ~ Beta(alpha, alpha), as in big_vision; 1 beside padding.
  """
  keys = row_random.fold_rows(row_keys, 'mixup')
  # A table: `jax.random.beta` loops until the rows of all devices are accepted.
  draw = functools.partial(
    jax.random.randint, shape=(), minval=0, maxval=_QUANTILES
  )
  drawn = jnp.asarray(_quantiles(alpha))[jax.vmap(draw)(keys)]
  return jnp.where(partners(mask) > 0, drawn, 1.0)


@functools.cache
def _quantiles(alpha: float) -> Float32[np.ndarray, ' Q']:
  """Returns equally likely values of max(s, 1 - s), ascending."""
  upper = 0.5 + (np.arange(_QUANTILES) + 0.5) / (2 * _QUANTILES)
  return scipy.special.betaincinv(alpha, alpha, upper).astype(np.float32)
