"""Pruning: exact counts, the tokens of a plain loop, and two equal forms."""

import functools
import math
from fractions import Fraction

import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eat import merging, pruning
from eat.pruning import Tokens

HUNDREDTHS = range(100)


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


def test_counts_are_exact_for_every_length_and_ratio():
  lengths = np.arange(1, 513)
  count = jax.jit(pruning.kept_count)
  for hundredths in HUNDREDTHS:
    exact = Fraction(hundredths, 100)
    want = [exact_count(int(length), exact) for length in lengths]
    got = count(jnp.asarray(lengths), jnp.float32(hundredths / 100))
    np.testing.assert_array_equal(got, want)
    sizes = [pruning.static_size(int(t), hundredths / 100) for t in lengths]
    assert sizes == want
  assert count._cache_size() == 1


def test_floats_would_count_wrong():
  # Shows that the test above could fail.
  wrong = [
    hundredths
    for hundredths in HUNDREDTHS
    if 1 + math.ceil((1 - np.float32(hundredths / 100)) * np.float32(100))
    != exact_count(101, Fraction(hundredths, 100))
  ]
  assert len(wrong) > 10


@pytest.mark.parametrize(
  ('ratio', 'min_tokens', 'want'),
  [
    (0.9, 4, [1, 2, 4, 4, 4]),
    (0.9, 1, [1, 2, 2, 2, 3]),
    (0.0, 1, [1, 2, 4, 9, 20]),
    (1.0, 1, [1, 1, 1, 1, 1]),
    (1.5, 3, [1, 2, 3, 3, 3]),
    (-0.5, 1, [1, 2, 4, 9, 20]),
  ],
)
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


def case(batch, length, width, ties, seed=0):
  generator = np.random.default_rng(seed)
  x = generator.normal(size=(batch, length, width)).astype(np.float32)
  scores = generator.integers(0, ties, size=(batch, length))
  return x, scores.astype(np.float32)


@pytest.mark.parametrize('ties', [1, 3, 1000])
@pytest.mark.parametrize('merge', [False, True])
def test_keeps_what_a_plain_loop_keeps(ties, merge):
  lengths = [1, 2, 5, 11, 16, 16]
  x, scores = case(6, 16, 4, ties)
  for ratio in (0.0, 0.3, 0.5, 0.77, 0.99):
    got = prune(start(x, lengths), scores, ratio, 16, 3, merge)
    assert got.x.shape == x.shape
    for row, length in enumerate(lengths):
      exact = Fraction(round(ratio * 100), 100)
      want = kept_places(scores[row], length, exact, 3)
      assert int(got.length[row]) == len(want)
      assert list(got.positions[row, : len(want)]) == want
      if not merge:
        np.testing.assert_array_equal(got.x[row, : len(want)], x[row, want])


def test_pads_are_not_kept_whatever_they_hold():
  x, scores = case(2, 8, 4, 1000)
  lengths = [3, 6]
  for contents in (np.inf, np.nan, 1e30):
    for row, length in enumerate(lengths):
      x[row, length:] = contents
      scores[row, length:] = contents
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


@pytest.mark.parametrize('merge', [False, True])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_ratio_zero_is_the_identity(merge, dtype):
  x, scores = case(3, 7, 5, 4)
  tokens = start(x, [7, 1, 4])
  tokens = tokens._replace(
    x=tokens.x.astype(dtype), sizes=jnp.full((3, 7), 3.0)
  )
  got = prune(tokens, scores, 0.0, 7, merge=merge)
  for name, want in tokens._asdict().items():
    np.testing.assert_array_equal(getattr(got, name), want)
  assert got.x.dtype == dtype


@pytest.mark.parametrize('merge', [False, True])
def test_the_ratio_does_not_recompile(merge):
  traces = []

  @jax.jit
  def run(tokens, scores, ratio):
    traces.append(1)
    return pruning.prune(tokens, scores, ratio, 7, merge=merge)

  x, scores = case(3, 7, 5, 4)
  kept = [
    int(run(start(x, [7, 7, 7]), jnp.asarray(scores), ratio).length[0])
    for ratio in jnp.linspace(0, 0.9, 7)
  ]
  assert kept == [7, 7, 6, 5, 4, 3, 2]
  assert len(traces) == 1


# Bucket and rows of it: together, alone, and together with more padding.
BATCHES = ((8, slice(0, 3)), (8, slice(1, 2)), (13, slice(0, 3)))
RATIOS = ((0.3, 0.3), (0.25, 0.67))
WIDE = np.random.default_rng(0).normal(size=(3, 13, 4)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=4)
def prune_twice(x, length, scores, ratios, sizes):
  tokens = start(x, length)
  for index, size in enumerate(sizes):
    placed = jnp.take_along_axis(scores[index], tokens.positions, axis=1)
    tokens = pruning.prune(tokens, placed, ratios[index], size)
  return tokens


def pruned_by_loop(scores, length, ratios):
  """Places of one row that are left after all prunings, `scores` `[P, L]`."""
  places = list(range(length))
  for step, ratio in enumerate(ratios):
    exact = Fraction(round(ratio * 100), 100)
    kept = kept_places(scores[step][places], len(places), exact)
    places = [places[index] for index in kept]
  return places


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(
  lengths=strategies.lists(strategies.integers(1, 8), min_size=3, max_size=3),
  ratios=strategies.sampled_from(RATIOS),
  scores=strategies.lists(
    strategies.integers(0, 4), min_size=2 * 3 * 8, max_size=2 * 3 * 8
  ),
)
def test_both_forms_keep_the_same_alone_in_batches_in_buckets(
  lengths, ratios, scores
):
  scores = np.reshape(scores, (2, 3, 8)).astype(np.float32)
  traced = tuple(jnp.float32(ratio) for ratio in ratios)
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
      got = prune_twice(x, np.array(lengths[rows]), padded, traced, sizes)
      got = jax.tree.map(np.asarray, got)
      assert got.x.shape[1] == sizes[-1]
      for row, places in enumerate(want):
        assert list(got.positions[row, : got.length[row]]) == places
        np.testing.assert_array_equal(got.x[row, : len(places)], x[row, places])


def merged_by_loop(x, sizes, length, keep):
  """Merging one row, token by token, in float64."""
  x = np.asarray(x, np.float64)
  kept = [i for i in range(length) if keep[i]]
  hosts = kept[1:] or kept
  totals, counts = x * sizes[:, None], np.array(sizes, np.float64)
  for i in range(length):
    if keep[i]:
      continue
    cosines = [
      x[i] @ x[j] / np.linalg.norm(x[i]) / np.linalg.norm(x[j]) for j in hosts
    ]
    host = hosts[int(np.argmax(cosines))]
    totals[host] += sizes[i] * x[i]
    counts[host] += sizes[i]
  return totals / counts[:, None], counts, kept


def test_merge_equals_a_plain_loop():
  lengths = [1, 2, 6, 9, 12]
  x, _ = case(5, 12, 6, 1)
  generator = np.random.default_rng(1)
  keep = generator.random((5, 12)) < 0.5
  keep[:, 0] = True
  keep[2, 1:] = False  # only [CLS] is kept
  sizes = generator.integers(1, 5, size=(5, 12)).astype(np.float32)
  got, got_sizes = jax.tree.map(
    np.asarray,
    jax.jit(merging.merge_removed)(x, sizes, jnp.asarray(lengths), keep),
  )
  joined = 0
  for row, length in enumerate(lengths):
    want, counts, kept = merged_by_loop(x[row], sizes[row], length, keep[row])
    np.testing.assert_allclose(got[row, kept], want[kept], atol=1e-5)
    np.testing.assert_array_equal(got_sizes[row, kept], counts[kept])
    joined += (counts[kept] > sizes[row, kept]).sum()
    if len(kept) > 1:
      np.testing.assert_array_equal(got[row, 0], x[row, 0])
    for place in set(range(12)) - set(kept):
      np.testing.assert_array_equal(got[row, place], x[row, place])
  assert joined >= 6
  assert float(got_sizes[2, 0]) == sizes[2, :6].sum()


def test_repeated_merging_is_the_mean_of_the_originals():
  x, scores = case(2, 12, 4, 1000)
  tokens, twin = start(x, [12, 9]), start(x, [12, 9])
  for size in (7, 4):
    tokens = prune(tokens, scores, 0.5, size, merge=True)
    twin = prune(twin, scores, 0.5, 12, merge=True)
  assert list(tokens.length) == [4, 3]
  for row, length in enumerate([12, 9]):
    count = int(tokens.length[row])
    sizes = np.asarray(tokens.sizes[row, :count])
    assert sizes[0] == 1
    assert sizes.sum() == length
    total = (np.asarray(tokens.x[row, :count]) * sizes[:, None]).sum(0)
    np.testing.assert_allclose(total, x[row, :length].sum(0), atol=1e-5)
    # The masked form adds in another order.
    np.testing.assert_allclose(
      twin.x[row, :count], tokens.x[row, :count], atol=1e-5
    )
    np.testing.assert_array_equal(twin.sizes[row, :count], sizes)


@pytest.mark.parametrize('merge', [False, True])
@pytest.mark.parametrize('size', [9, 6])
def test_gradient_equals_finite_differences(merge, size):
  x, scores = case(3, 9, 4, 1000)
  generator = np.random.default_rng(2)
  probe = generator.normal(size=(3, size, 4)).astype(np.float32)

  @jax.jit
  def total(x):
    got = pruning.prune(
      start(x, [9, 4, 1]), jnp.asarray(scores), 0.5, size, merge=merge
    )
    kept = jnp.arange(size)[None] < got.length[:, None]
    return jnp.where(kept[..., None], got.x * probe, 0.0).sum()

  gradient = np.asarray(jax.grad(total)(x))
  for _ in range(5):
    way = generator.normal(size=x.shape).astype(np.float32)
    # Linear in x, so a large step costs nothing.
    want = (total(x + 0.01 * way) - total(x - 0.01 * way)) / 0.02
    np.testing.assert_allclose((gradient * way).sum(), want, atol=2e-3)
  removed = np.abs(gradient).sum(-1) == 0
  # Pads have none; of the removed tokens only the merged ones have one.
  assert removed[1, 4:].all()
  assert removed[2, 1:].all()
  assert removed[0].sum() == (0 if merge else 4)


def test_restore_equals_a_plain_loop():
  x, scores = case(3, 10, 4, 1000)
  lengths = [10, 7, 1]
  states = np.random.default_rng(3).normal(size=(2, 3, 10, 4)).astype('f')
  for sizes in ((10, 10), (6, 4)):
    full, want = jnp.asarray(x), x.copy()
    tokens = start(x, lengths)
    for step, size in enumerate(sizes):
      tokens = prune(tokens, scores, 0.5, size)
      tokens = tokens._replace(x=states[step, :, :size])
      full = jax.jit(pruning.restore)(full, tokens)
      for row in range(3):
        for slot in range(int(tokens.length[row])):
          place = int(tokens.positions[row, slot])
          want[row, place] = states[step, row, slot]
      np.testing.assert_array_equal(full, want)
  assert (want != x).any(-1).sum(1).tolist() == [6, 4, 1]


def test_gradient_of_restore_reaches_tokens_and_the_rest():
  x, scores = case(2, 6, 3, 1000)
  tokens = prune(start(x, [6, 3]), scores, 0.5, 4)

  def total(full, states):
    restored = pruning.restore(full, tokens._replace(x=states))
    return (restored * jnp.asarray(x)).sum()

  by_full, by_states = jax.tree.map(
    np.asarray, jax.jit(jax.grad(total, (0, 1)))(jnp.asarray(x), tokens.x)
  )
  for row in range(2):
    count = int(tokens.length[row])
    places = np.asarray(tokens.positions[row, :count])
    np.testing.assert_array_equal(by_states[row, :count], x[row, places])
    np.testing.assert_array_equal(by_states[row, count:], 0.0)
    np.testing.assert_array_equal(by_full[row, places], 0.0)
    rest = np.setdiff1d(np.arange(6), places)
    np.testing.assert_array_equal(by_full[row, rest], x[row, rest])


def test_norm_scores():
  x, _ = case(2, 5, 8, 1)
  got = pruning.norm_scores(jnp.asarray(x))
  np.testing.assert_allclose(got, np.linalg.norm(x, axis=-1), atol=1e-5)
  gradient = jax.grad(lambda x: pruning.norm_scores(x).sum())
  np.testing.assert_array_equal(gradient(jnp.zeros((1, 2, 3))), 0.0)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_learned_scores_train_through_gates_of_one(dtype):
  x = jnp.asarray(case(2, 5, 8, 1)[0], dtype)
  scorer = pruning.TokenScorer()
  variables = scorer.init(jax.random.key(0), x)
  gated, scores = scorer.apply(variables, x)
  np.testing.assert_array_equal(gated, x)
  assert gated.dtype == dtype
  assert scores.dtype == jnp.float32
  assert len(np.unique(scores)) == 10
  probe = jnp.asarray(case(2, 5, 8, 1, seed=4)[0], dtype)

  def total(variables):
    return (scorer.apply(variables, x)[0] * probe).sum().astype(jnp.float32)

  gradient = jax.grad(total)(variables)['params']['score']
  gate = 1 / (1 + np.exp(-np.asarray(scores, np.float64)))
  slope = gate * (1 - gate)
  wide, probe = (np.asarray(v, np.float64) for v in (x, probe))
  slope = slope * (wide * probe).sum(-1)
  slope[:, 0] = 0  # [CLS]
  tolerance = 1e-4 if dtype == jnp.float32 else 0.05
  got = nn.unbox(gradient)
  np.testing.assert_allclose(got['bias'], [slope.sum()], atol=tolerance)
  np.testing.assert_allclose(
    got['kernel'][:, 0], np.einsum('bs,bsd->d', slope, wide), atol=tolerance
  )


@pytest.mark.parametrize('merge', [False, True])
def test_rows_on_many_devices_do_not_communicate(merge):
  mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))
  rows = NamedSharding(mesh, PartitionSpec('data'))
  x, scores = case(16, 12, 8, 1000)
  lengths = np.arange(16) % 12 + 1

  def total(x, scores, ratio):
    tokens = start(x, lengths)
    got = pruning.prune(tokens, scores, ratio, 9, merge=merge)
    return jnp.square(got.x).sum((1, 2)), pruning.restore(x, got)

  def gradient(*args):
    return jax.grad(lambda *args: total(*args)[0].sum())(*args)

  args = (*jax.device_put((x, scores), rows), jnp.float32(0.4))
  for function in (total, gradient):
    compiled = jax.jit(function).lower(*args).compile()
    text = compiled.as_text()
    for word in ('all-gather', 'all-to-all', 'collective', 'all-reduce('):
      assert word not in text, word
  want = jax.jit(total)(x, scores, jnp.float32(0.4))
  for one, other in zip(jax.jit(total)(*args), want, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize('size', [0, 6])
def test_size_must_fit(size):
  x, scores = case(1, 5, 3, 4)
  with pytest.raises(ValueError, match=rf'size: .*\[1, 5\], got {size}'):
    pruning.prune(start(x, [5]), jnp.asarray(scores), 0.3, size)


def test_a_small_size_keeps_the_best_that_fit():
  x, scores = case(1, 8, 3, 1000)
  got = prune(start(x, [8]), scores, 0.0, 4)
  want = kept_places(scores[0], 8, Fraction(4, 7))
  assert list(got.positions[0]) == want
  assert list(got.length) == [4]
