"""The kinds of tokens that iterations are counted by (the paper's Table 1)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eval_lib.metrics import Average
from train_lib.task import Batch

# Replacements of a word to predict, in the order of `mlm_kind` in a batch of
# `dataset_lib.pretraining`.
MASKED = ('mask', 'random', 'original')
SPECIAL = ('cls', 'sep')
KINDS = ('all', 'unmasked', *MASKED, *SPECIAL)


def masks(batch: Batch) -> dict[str, Bool[Array, 'B L']]:
  """Returns a mask of the tokens of each of `KINDS`, False in padding rows.

  'all' are the real tokens, 'unmasked' those of the text that are not to be
  predicted; a row is [CLS] x1 [SEP] x2 [SEP], or [CLS] x1 [SEP].

  Args:
    batch: with `tokens`, `token_types`, `length`, `mask`, and in pretraining
      `mlm_positions`, `mlm_kind` and `mlm_weights` `[B, P]`.
  """
  rows, length = batch['tokens'].shape
  place = jnp.arange(length)[None]
  real = (place < batch['length'][:, None]) & (batch['mask'] > 0)[:, None]
  # The tokens of the first segment come first, its [SEP] at their end.
  first = ((batch['token_types'] == 0) & real).sum(1)
  ends = (place == first[:, None] - 1) | (place == batch['length'][:, None] - 1)
  found = {'all': real, 'cls': real & (place == 0), 'sep': real & ends}
  masked = jnp.zeros((rows, length), bool)
  for number, kind in enumerate(MASKED):
    found[kind] = masked
    if 'mlm_kind' in batch:
      chosen = (batch['mlm_kind'] == number) & (batch['mlm_weights'] > 0)
      found[kind] = _scattered(batch['mlm_positions'], chosen, length) & real
  special = found['cls'] | found['sep']
  predicted = found['mask'] | found['random'] | found['original']
  found['unmasked'] = real & ~special & ~predicted
  return {kind: found[kind] for kind in KINDS}


def means(
  name: str, values: Float[Array, 'B L'] | Int[Array, 'B L'], batch: Batch
) -> dict[str, Average]:
  """Returns the mean of a value per token, for each of `KINDS`."""
  flat = values.astype(jnp.float32).reshape(-1)
  return {
    f'{name}_{kind}': Average.from_values(
      flat, tokens.astype(jnp.float32).reshape(-1)
    )
    for kind, tokens in masks(batch).items()
  }


def _scattered(
  positions: Int[Array, 'B P'], chosen: Bool[Array, 'B P'], length: int
) -> Bool[Array, 'B L']:
  """Returns True at the chosen positions of each row."""
  rows = jnp.arange(positions.shape[0])[:, None]
  places = jnp.where(chosen, positions, length)
  nothing = jnp.zeros((positions.shape[0], length), bool)
  return nothing.at[rows, places].set(True, mode='drop')
