"""Spans of tagged words, such as B-PER I-PER, counted as conlleval does.

Tjong Kim Sang and Buchholz (2000); seqeval's default mode gives the same F1 on
the host. Counts of arrays merge exactly over batches, devices and processes.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from eval_lib.metrics import Average

OUTSIDE = 'O'
_TAG = re.compile('[BIESLU](-.+)?')  # IOB1, IOB2, IOBES, BILOU


class Scheme(NamedTuple):
  """What the tags of `K` classes say about spans."""

  kind: np.ndarray  # number of the type of span, int32 `[K]`; -1 outside
  begins: np.ndarray  # bool `[K]`: the first word of a span
  ends: np.ndarray  # bool `[K]`: the last word


def scheme(names: Sequence[str]) -> Scheme | None:
  """Returns the scheme of class names; None if they are not tags of spans."""
  tags = [name for name in names if name != OUTSIDE]
  if not tags or not all(map(_TAG.fullmatch, tags)):
    return None
  kinds = sorted({name[2:] for name in tags})
  kind = [-1 if n == OUTSIDE else kinds.index(n[2:]) for n in names]
  begins = np.array([name[0] in 'BSU' for name in names])
  ends = np.array([name[0] in 'ESLU' for name in names])
  return Scheme(np.array(kind, np.int32), begins, ends)


def _bounds(
  tags: Int[Array, 'B L'], is_word: Bool[Array, 'B L'], scheme: Scheme
) -> tuple[Int[Array, 'B L'], Bool[Array, 'B L'], Int[Array, 'B L']]:
  """Returns type, whether a span starts, and the next word outside of it."""
  size = tags.shape[1]
  place = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], tags.shape)
  kind, begins, ends = (jnp.asarray(table)[tags] for table in scheme)
  starts = jax.lax.cummax(jnp.where(is_word, place, -1), axis=1)
  before = jnp.pad(starts, ((0, 0), (1, 0)), constant_values=-1)[:, :size]
  at = jnp.maximum(before, 0)
  last_kind = jnp.where(before < 0, -1, jnp.take_along_axis(kind, at, 1))
  last_ends = (before >= 0) & jnp.take_along_axis(ends, at, 1)
  new = begins | last_ends | (kind != last_kind)
  breaks = jnp.where(is_word & (new | (kind < 0)), place, size)
  following = jax.lax.cummin(breaks, axis=1, reverse=True)
  end = jnp.pad(following, ((0, 0), (0, 1)), constant_values=size)[:, 1:]
  return kind, is_word & (kind >= 0) & new, end


def f1(
  predicted: Int[Array, 'B L'],
  tags: Int[Array, 'B L'],
  is_word: Bool[Array, 'B L'],
  scheme: Scheme,
) -> Average:
  """Returns F1 over spans, `2 correct / (predicted + true)`; NaN without any.

  Spans are equal if their bounds and types are; only words are read.
  """
  ours, theirs = (_bounds(x, is_word, scheme) for x in (predicted, tags))
  same = [a == b for a, b in zip(ours, theirs, strict=True)]
  correct = ours[1] & theirs[1] & same[0] & same[2]
  count = (ours[1].sum() + theirs[1].sum()).astype(jnp.float32)
  return Average(2.0 * correct.sum().astype(jnp.float32), count)
