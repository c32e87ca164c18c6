"""Pruning of random tokens, jitted, and what a plain loop keeps of them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from eat import pruning
from eat.pruning import Tokens


def exact_count(length, ratio, min_tokens=1):
  """`1 + ceil((1 - p) (t - 1))` in rational numbers."""
  count = 1 + math.ceil((1 - ratio) * (length - 1))
  return min(max(count, min_tokens), length)


def kept_places(scores, length, ratio, min_tokens=1):
  """What Algorithm 1 keeps of one row, by sorting."""
  count = exact_count(length, ratio, min_tokens)
  order = sorted(range(1, length), key=lambda place: (-scores[place], place))
  return [0, *sorted(order[: count - 1])]


def start(x, length):
  places = np.arange(x.shape[1], dtype=np.int32)[None]
  return Tokens(
    jnp.asarray(x, jnp.float32),
    jnp.asarray(length, jnp.int32),
    jnp.asarray(np.broadcast_to(places, x.shape[:2])),
  )


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _prune(tokens, scores, ratio, size, min_tokens, merge):
  return pruning.prune(
    tokens, scores, ratio, size, min_tokens=min_tokens, merge=merge
  )


def prune(tokens, scores, ratio, size, min_tokens=1, merge=False):
  """Jitted, to NumPy, of scores `[B, L]` by original place."""
  places = np.asarray(tokens.positions)
  placed = jnp.asarray(np.take_along_axis(scores, places, axis=1))
  ratio = jnp.float32(ratio)
  got = _prune(tokens, placed, ratio, size, min_tokens, merge)
  return jax.tree.map(np.asarray, got)


def case(batch, length, width, ties, seed=0):
  generator = np.random.default_rng(seed)
  x = generator.normal(size=(batch, length, width)).astype(np.float32)
  scores = generator.integers(0, ties, size=(batch, length))
  return x, scores.astype(np.float32)
