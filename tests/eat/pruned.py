"""Pruning of random tokens, jitted, and the same by sorting."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from eat import pruning
from eat.pruning import Tokens


def exact_count(length, ratio):
  """`1 + ceil((1 - p) (t - 1))` in rational numbers."""
  return min(1 + math.ceil((1 - ratio) * (length - 1)), length)


def kept_places(scores, length, ratio):
  """Places of one row that Algorithm 1 keeps, by sorting."""
  count = exact_count(length, ratio)
  order = sorted(range(1, length), key=lambda place: (-scores[place], place))
  return [0, *sorted(order[: count - 1])]


def start(x, length):
  places = np.arange(x.shape[1], dtype=np.int32)[None]
  return Tokens(
    jnp.asarray(x, jnp.float32),
    jnp.asarray(length, jnp.int32),
    jnp.asarray(np.broadcast_to(places, x.shape[:2])),
  )


@functools.partial(jax.jit, static_argnums=(3, 4))
def _prune(tokens, scores, ratio, size, merge):
  placed = jnp.take_along_axis(scores, tokens.positions, axis=1)
  return pruning.prune(tokens, placed, ratio, size, merge=merge)


def prune(tokens, scores, ratio, size, merge=False):
  """Jitted, to NumPy, of scores `[B, L]` by original place."""
  got = _prune(tokens, scores, jnp.float32(ratio), size, merge)
  return jax.tree.map(np.asarray, got)


def case(batch, length, width, ties, seed=0):
  generator = np.random.default_rng(seed)
  x = generator.normal(size=(batch, length, width)).astype(np.float32)
  scores = generator.integers(0, ties, size=(batch, length))
  return x, scores.astype(np.float32)
