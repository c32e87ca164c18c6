"""Metrics against NumPy on the concatenated data."""

import itertools
import math

import clu.metrics
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eval_lib import metrics

REFERENCES = {
  metrics.Average: np.mean,
  metrics.Variance: np.var,
  metrics.Minimum: np.min,
  metrics.Maximum: np.max,
}
KINDS = sorted(REFERENCES, key=lambda kind: kind.__name__)


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


def real_values(data):
  return np.concatenate(
    [np.asarray(v, np.float64)[np.asarray(m) > 0] for v, m in data]
  )


@pytest.mark.parametrize('kind', KINDS)
def test_every_merge_order_equals_numpy(kind):
  data = list(batches([6, 1, 0, 4]))
  want = REFERENCES[kind](real_values(data))
  states = [kind.from_values(*pair) for pair in data]
  for order in itertools.permutations(states):
    a, b, c, d = order
    chain = a.merge(b).merge(c).merge(d).compute()
    tree = a.merge(b).merge(c.merge(d)).compute()
    np.testing.assert_allclose([chain, tree], want, rtol=1e-5)


@pytest.mark.parametrize('kind', KINDS)
def test_scan_over_micro_batches_equals_numpy(kind):
  data = list(batches([3, 6, 0, 2]))
  stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *data)

  @jax.jit
  def run(stacked):
    _, states = jax.lax.scan(
      lambda carry, pair: (carry, kind.from_values(*pair)), 0, stacked
    )
    return states.reduce()

  want = REFERENCES[kind](real_values(data))
  np.testing.assert_allclose(run(stacked).compute(), want, rtol=1e-5)


@pytest.mark.parametrize('kind', KINDS)
def test_host_reduction_in_float64(kind):
  data = list(batches([5, 6, 1]))
  states = jax.device_get([kind.from_values(*pair) for pair in data])
  stacked = jax.tree.map(lambda *x: np.stack(x).astype(np.float64), *states)
  want = REFERENCES[kind](real_values(data))
  np.testing.assert_allclose(stacked.reduce().compute(), want, rtol=1e-6)


@pytest.mark.parametrize('kind', KINDS)
def test_nothing_counted_is_nan(kind):
  (empty,) = batches([0])
  state = kind.from_values(*empty)
  assert math.isnan(state.compute())
  assert math.isnan(state.merge(state).compute())
  nothing = kind.from_values(jnp.zeros((0,)), jnp.zeros((0,)))
  assert math.isnan(nothing.compute())


@pytest.mark.parametrize('kind', KINDS)
def test_sharded_rows_equal_numpy(kind):
  mesh = jax.make_mesh(
    (8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  rows = NamedSharding(mesh, PartitionSpec('data'))
  data = list(batches([11], width=16))
  values, mask = jax.device_put(data[0], rows)
  state = jax.jit(kind.from_values)(values, mask)
  want = REFERENCES[kind](real_values(data))
  np.testing.assert_allclose(state.compute(), want, rtol=1e-5)


def test_half_precision_values_are_summed_in_float32():
  values = jnp.full((4096,), 1.0, jnp.bfloat16)
  state = metrics.Average.from_values(values, jnp.ones((4096,)))
  assert state.total.dtype == jnp.float32
  assert float(state.total) == 4096.0


def test_variance_keeps_its_digits_far_from_zero():
  """float32 sums of squares would give 0 or a negative number here."""
  data = list(batches([50, 50, 50, 50], width=50, offset=10_000.0))
  states = [metrics.Variance.from_values(*pair) for pair in data]
  got = jax.tree.map(lambda *x: jnp.stack(x), *states).reduce().compute()
  np.testing.assert_allclose(got, np.var(real_values(data)), rtol=1e-5)


def test_variance_of_equal_lengths_is_zero():
  state = metrics.Variance.from_values(jnp.full((7,), 8.0), jnp.ones((7,)))
  assert state.merge(state).compute() == 0.0


def test_union_is_the_share_of_flags_seen_by_real_rows():
  flags = jnp.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]], bool)
  first = metrics.Union.from_values(flags, jnp.array([1.0, 1.0, 0.0]))
  again = metrics.Union(flags[0])
  assert first.compute() == 0.5
  assert first.merge(again).compute() == 0.5
  assert first.merge(metrics.Union(flags[2])).compute() == 1.0
  assert metrics.Union(flags).reduce().compute() == 1.0


def test_compute_fetches_a_dictionary():
  state = metrics.Average.from_values(jnp.array([1.0, 3.0]), jnp.ones((2,)))
  assert metrics.compute({'a': state}) == {'a': 2.0}


def test_metrics_of_clu_merge_too():
  labels = np.array([0, 1, 1])
  logits = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], np.float32)
  merged = None
  for rows in (slice(0, 2), slice(2, 3)):
    state = clu.metrics.Accuracy.from_model_output(
      logits=jnp.asarray(logits[rows]), labels=jnp.asarray(labels[rows])
    )
    merged = metrics.merge_on_host(merged, {'accuracy': state})
  assert metrics.compute(merged) == pytest.approx({'accuracy': 2 / 3})
