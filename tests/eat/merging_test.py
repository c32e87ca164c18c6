"""Merging against a plain loop; sums over the original tokens stay."""

import jax
import jax.numpy as jnp
import numpy as np

from eat import pruning
from tests.eat.pruned import case, prune, start


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
    jax.jit(pruning.merge_removed)(x, sizes, jnp.asarray(lengths), keep),
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
