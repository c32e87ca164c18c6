"""Kinds of the tokens of a row of a text, and means over each."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Num

from eval_lib.metrics import Average
from train_lib.task import Batch

# Replacements of a word to predict, in the order of `mlm_kind` in a batch of
# `dataset_lib.pretraining`.
MASKED = ('mask', 'random', 'original')
# The kinds of tokens of the paper's Table 1.
KINDS = ('all', 'unmasked', *MASKED, 'cls', 'sep')


def masks(batch: Batch) -> dict[str, Bool[Array, 'B L']]:
  """Returns a mask of the tokens of each of `KINDS`, False in padding rows.

  'all' are the real tokens, 'unmasked' tokens of the text that are not to be
  predicted; a row is [CLS] x1 [SEP] x2 [SEP], or [CLS] x1 [SEP].
  """
  rows, size = batch['tokens'].shape
  place, length = jnp.arange(size)[None], batch['length'][:, None]
  real = (place < length) & (batch['mask'] > 0)[:, None]
  # The tokens of the first segment come first, its [SEP] at their end.
  first = ((batch['token_types'] == 0) & real).sum(1, keepdims=True)
  is_sep = (place == first - 1) | (place == length - 1)
  kind = jnp.where(place == 0, KINDS.index('cls'), KINDS.index('unmasked'))
  kind = jnp.where(is_sep, KINDS.index('sep'), kind)
  if 'mlm_kind' in batch:
    places = jnp.where(batch['mlm_weights'] > 0, batch['mlm_positions'], size)
    masked = KINDS.index(MASKED[0]) + batch['mlm_kind']
    kind = kind.at[jnp.arange(rows)[:, None], places].set(masked, mode='drop')
  by_kind = {name: real & (kind == n) for n, name in enumerate(KINDS)}
  return by_kind | {'all': real}


def means(
  name: str, values: Num[Array, 'B L'], batch: Batch
) -> dict[str, Average]:
  """Returns the mean of a value per token, for each of `KINDS`."""
  return {
    f'{name}_{kind}': Average.from_values(values, tokens.astype(jnp.float32))
    for kind, tokens in masks(batch).items()
  }
