"""Pruning: exact counts, the tokens of a plain loop, and two equal forms."""

import functools
import math
from fractions import Fraction

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from model_lib import tokens as pruning


def exact_count(length, ratio):
  """`1 + ceil((1 - p) (t - 1))` in rational numbers."""
  return min(1 + math.ceil((1 - ratio) * (length - 1)), length)


def kept_places(scores, length, ratio):
  """Places of one row that Algorithm 1 keeps, by sorting."""
  count = exact_count(length, ratio)
  order = sorted(range(1, length), key=lambda place: (-scores[place], place))
  return [0, *sorted(order[: count - 1])]


def start(x, length):
  x = jnp.asarray(x, jnp.float32)
  return pruning.whole(x, jnp.asarray(length, jnp.int32))


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


def test_counts_are_exact_for_every_length_and_ratio():
  lengths = np.arange(1, 513)
  count = jax.jit(pruning.kept_count)
  for hundredths in range(100):
    exact = Fraction(hundredths, 100)
    want = [exact_count(int(length), exact) for length in lengths]
    got = count(jnp.asarray(lengths), jnp.float32(hundredths / 100))
    np.testing.assert_array_equal(got, want)
    sizes = [pruning.static_size(int(t), hundredths / 100) for t in lengths]
    assert sizes == want
  assert count._cache_size() == 1


@pytest.mark.parametrize(
  ('ratio', 'min_tokens', 'want'),
  [
    (0.9, 4, [1, 2, 4, 4, 4]), (1.0, 1, [1, 1, 1, 1, 1]),
    (1.5, 3, [1, 2, 3, 3, 3]), (-0.5, 1, [1, 2, 4, 9, 20]),
  ],
)  # fmt: skip
def test_floor_and_limits(ratio, min_tokens, want):
  lengths = [1, 2, 4, 9, 20]
  got = pruning.kept_count(jnp.asarray(lengths), ratio, min_tokens)
  np.testing.assert_array_equal(got, want)
  assert want == [pruning.static_size(t, ratio, min_tokens) for t in lengths]


def test_the_static_size_holds_every_row():
  # Ratios halfway between two steps: float32 rounds them either way.
  ratios = [*np.linspace(0, 1, 997), *(np.arange(0, 10_000, 97) + 0.5) / 1e4]
  lengths = jnp.arange(1, 513)
  count = jax.jit(pruning.kept_count, static_argnums=2)
  for ratio in ratios:
    counts = np.asarray(count(lengths, jnp.float32(ratio), 5))
    assert (counts <= pruning.static_size(512, float(ratio), 5)).all()


@pytest.mark.parametrize('contents', [np.inf, np.nan, 1e30])
def test_pads_are_not_kept_whatever_they_hold(contents):
  x, scores = case(2, 8, 4, 1000)
  lengths = [3, 6]
  for row, length in enumerate(lengths):
    x[row, length:] = scores[row, length:] = contents
  got = prune(start(x, lengths), scores, 0.5, 5, merge=True)
  for row, length in enumerate(lengths):
    want = kept_places(scores[row], length, Fraction(1, 2))
    assert list(got.positions[row, : len(want)]) == want
    assert np.isfinite(got.x[row, : len(want)]).all()


@pytest.mark.parametrize('score', [-np.inf, np.inf, np.nan])
def test_scores_that_are_not_finite_keep_the_count(score):
  x, scores = case(1, 8, 4, 1000)
  scores[0, [2, 4, 5]] = score
  got = prune(start(x, [6]), scores, 0.4, 8)
  assert list(got.length) == [4]
  # Places 1 to 5, three of them with this score; the best are left.
  best = [2, 4, 5] if score != -np.inf else [1, 2, 3]
  assert list(got.positions[0, :4]) == [0, *best]


@pytest.mark.parametrize('runtime', ['xla', 'onnxruntime'])
@pytest.mark.parametrize('size', [7.3, -2e-5, 3e6])
def test_scores_equal_but_for_rounding_keep_the_earlier(size, runtime):
  _, equal = case(6, 24, 1, ties=3)
  equal = (equal + 1) * np.float32(size)
  noise = np.random.default_rng(1).integers(-3, 4, equal.shape) * 2.0**-23
  noisy = np.float32(equal * (1 + noise))
  assert [len({*row}) > 6 for row in noisy] == [True] * 6
  length, count = np.full(6, 24), np.arange(6) * 3 + 4
  given = [noisy, length.astype(np.int32), count.astype(np.int32)]
  if runtime == 'onnxruntime':
    program = pytest.importorskip('serve_lib.onnx.program')
    got = program.build(pruning.best, given)(given)
  else:
    got = jax.jit(pruning.best)(*map(jnp.asarray, given))
  for row in range(6):
    order = sorted(range(1, 24), key=lambda n: (-equal[row, n], n))
    want = {0, *order[: count[row] - 1]}
    assert {*np.flatnonzero(got[row])} == want
  # Scores that differ by more are no ties.
  other = equal * (1 + np.arange(24) * 2.0**-14)
  kept = pruning.best(jnp.float32(other), *map(jnp.asarray, given[1:]))
  order = np.argsort(-other[0, 1:])[:3] + 1
  assert {*np.flatnonzero(kept[0])} == {0, *order}


@pytest.mark.parametrize('merge', [False, True])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_ratio_zero_is_the_identity(merge, dtype):
  x, scores = case(3, 7, 5, 4)
  tokens = start(x, [7, 1, 4])
  tokens = tokens._replace(
    x=tokens.x.astype(dtype), sizes=jnp.full((3, 7), 3.0)
  )
  got = prune(tokens, scores, 0.0, 7, merge)
  for name, want in tokens._asdict().items():
    np.testing.assert_array_equal(getattr(got, name), want)
  assert got.x.dtype == dtype


# Bucket and rows of it: together, alone, and together with more padding.
BATCHES = ((8, slice(0, 3)), (8, slice(1, 2)), (13, slice(0, 3)))
WIDE = np.random.default_rng(0).normal(size=(3, 13, 4)).astype(np.float32)


def pruned_by_loop(scores, length, ratios):
  """Places of one row that are left after all prunings, `scores` `[P, L]`."""
  places = list(range(length))
  for step, ratio in enumerate(ratios):
    exact = Fraction(round(ratio * 100), 100)
    kept = kept_places(scores[step][places], len(places), exact)
    places = [places[index] for index in kept]
  return places


@pytest.mark.slow
@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(
  lengths=strategies.lists(strategies.integers(1, 8), min_size=3, max_size=3),
  ratios=strategies.sampled_from([(0.3, 0.3), (0.25, 0.67), (0.77, 0.0)]),
  scores=strategies.lists(strategies.integers(0, 4), min_size=48, max_size=48),
  merge=strategies.booleans(),
)
def test_both_forms_keep_the_same_alone_in_batches_in_buckets(
  lengths, ratios, scores, merge
):
  scores = np.reshape(scores, (2, 3, 8)).astype(np.float32)
  for bucket, rows in BATCHES:
    # Pads have the best scores.
    padded = np.full((2, 3, bucket), 9, np.float32)
    padded[:, :, :8] = scores
    padded, x = padded[:, rows], WIDE[rows, :bucket]
    want = [
      pruned_by_loop(padded[:, row], length, ratios)
      for row, length in enumerate(lengths[rows])
    ]
    first = pruning.static_size(bucket, ratios[0])
    second = pruning.static_size(first, ratios[1])
    for sizes in ((bucket, bucket), (first, second)):
      got = start(x, lengths[rows])
      for step, size in enumerate(sizes):
        got = prune(got, padded[step], ratios[step], size, merge)
      assert got.x.shape[1] == sizes[-1]
      for row, places in enumerate(want):
        assert list(got.positions[row, : got.length[row]]) == places
        if not merge:
          kept = got.x[row, : len(places)]
          np.testing.assert_array_equal(kept, x[row, places])


def test_a_small_size_keeps_the_best_that_fit():
  x, scores = case(1, 8, 3, 1000)
  got = prune(start(x, [8]), scores, 0.0, 4)
  assert list(got.positions[0]) == kept_places(scores[0], 8, Fraction(4, 7))
  assert list(got.length) == [4]
