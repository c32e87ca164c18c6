"""Metrics against NumPy on the concatenated data."""

import itertools
import math

import clu.metrics
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval_lib import metrics
from tests import contexts

REFERENCES = {
  metrics.Average: np.mean,
  metrics.Variance: np.var,
  metrics.Minimum: np.min,
  metrics.Maximum: np.max,
}
each_kind = pytest.mark.parametrize('kind', REFERENCES)


def batches(sizes, width=6, offset=3.0):
  """Batches of `width` rows with `size` real ones; padding holds NaN."""
  rng = np.random.default_rng(0)
  for size in sizes:
    values = np.full(width, np.nan, np.float32)
    mask = np.zeros(width, np.float32)
    places = rng.permutation(width)[:size]
    values[places] = rng.normal(offset, 2.0, size)
    mask[places] = 1
    yield jnp.asarray(values), jnp.asarray(mask)


def expected(kind, data):
  """The metric of the real rows of batches, in float64."""
  rows = [np.asarray(v, np.float64)[np.asarray(m) > 0] for v, m in data]
  return REFERENCES[kind](np.concatenate(rows))


@each_kind
def test_every_merge_equals_numpy(kind):
  data = list(batches([3, 6, 0, 1]))
  want = expected(kind, data)
  states = [kind.from_values(*pair) for pair in data]
  for a, b, c, d in itertools.permutations(states):
    chain = a.merge(b).merge(c).merge(d).compute()
    tree = a.merge(b).merge(c.merge(d)).compute()
    np.testing.assert_allclose([chain, tree], want, rtol=1e-5)
  stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *data)
  scanned = jax.jit(lambda stacked: jax.lax.scan(
    lambda carry, pair: (carry, kind.from_values(*pair)), 0, stacked
  )[1])(stacked)  # fmt: skip
  wide = jax.tree.map(lambda x: np.asarray(x, np.float64), scanned)
  np.testing.assert_allclose(scanned.reduce().compute(), want, rtol=1e-5)
  np.testing.assert_allclose(wide.reduce().compute(), want, rtol=1e-6)
  # Any number of axes, split over devices.
  rows = jax.tree.map(lambda x: x.reshape(8, 3), stacked)
  state = jax.jit(kind.from_values)(*contexts.rows_on(8)(rows))
  np.testing.assert_allclose(state.compute(), want, rtol=1e-5)


@each_kind
def test_nothing_counted_is_nan(kind):
  (empty,) = batches([0])
  state = kind.from_values(*empty)
  nothing = kind.from_values(jnp.zeros((0,)), jnp.zeros((0,)))
  for one in (state, state.merge(state), nothing):
    assert math.isnan(one.compute())


def test_half_precision_values_are_summed_in_float32():
  values = jnp.full((4096,), 1.0, jnp.bfloat16)
  state = metrics.Average.from_values(values, jnp.ones((4096,)))
  assert (state.total.dtype, state.total) == (jnp.float32, 4096.0)


def test_variance_keeps_its_digits_far_from_zero():
  # float32 sums of squares would give 0 or a negative number here.
  data = list(batches([50, 50, 50, 50], width=50, offset=10_000.0))
  states = [metrics.Variance.from_values(*pair) for pair in data]
  got = jax.tree.map(lambda *x: jnp.stack(x), *states).reduce().compute()
  want = expected(metrics.Variance, data)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  same = metrics.Variance.from_values(jnp.full((7,), 8.0), jnp.ones((7,)))
  assert same.merge(same).compute() == 0.0


def test_union_is_the_share_of_flags_seen():
  flags = jnp.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]], bool)
  first = metrics.Union(flags[:2].any(0))
  assert first.compute() == 0.5
  assert first.merge(metrics.Union(flags[0])).compute() == 0.5
  assert first.merge(metrics.Union(flags[2])).compute() == 1.0


def test_metrics_of_clu_merge_too():
  collected = metrics.Collected()
  for labels, logits in (([0, 1], [[1.0, 0], [0, 1]]), ([1], [[1.0, 0]])):
    state = clu.metrics.Accuracy.from_model_output(
      logits=jnp.array(logits), labels=jnp.array(labels)
    )
    collected.add({'accuracy': state})
  assert metrics.compute(collected.take()) == pytest.approx({'accuracy': 2 / 3})
