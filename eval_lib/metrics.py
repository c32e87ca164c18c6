"""Metrics that merge: sums over micro-batches, batches and devices are exact.

A metric is a small pytree, built inside a jitted step from the values and the
mask of a batch. States merge in any order and grouping, so padding, unequal
batches and micro-batches all count as in one pass over the concatenated data.
States may be JAX arrays (in a step) or NumPy arrays (on the host).
"""

import math
from collections.abc import Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

# A jax.Array, a tracer, a ShapeDtypeStruct or a numpy.ndarray: metrics pass
# through scan, eval_shape and device_get.
Leaf = Any


class Metric:
  """What all metrics share."""

  def reduce(self) -> 'Metric':
    """Merges the states stacked along a leading axis, e.g. by `lax.scan`."""
    raise NotImplementedError

  def compute(self) -> float:
    """The value on the host; NaN if nothing was counted."""
    raise NotImplementedError

  def merge(self, other: 'Metric') -> 'Metric':
    """The state of both metrics' data together; symmetric."""
    return jax.tree.map(lambda a, b: jnp.stack((a, b)), self, other).reduce()


@flax.struct.dataclass
class Average(Metric):
  """Mean over real rows.

  Attributes:
    total: sum of the values, float32 `[]`.
    count: number of real rows, float32 `[]`.
  """

  total: Leaf
  count: Leaf

  @classmethod
  def from_values(
    cls, values: Float[Array, ' B'], mask: Float[Array, ' B']
  ) -> 'Average':
    """Counts the rows with mask 1; what the others hold, even NaN, is lost."""
    return cls(total=_kept(values, mask, 0.0).sum(), count=_count(mask))

  def reduce(self) -> 'Average':
    """See `Metric.reduce`."""
    return Average(total=self.total.sum(0), count=self.count.sum(0))

  def compute(self) -> float:
    """The mean, or NaN without rows."""
    return _ratio(self.total, self.count)


@flax.struct.dataclass
class Variance(Metric):
  """Population variance over real rows.

  The state is (count, mean, sum of squared deviations): a sum of squares in
  float32 loses everything when the mean is large. States merge by Chan, Golub
  and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
  variances" (1979).

  Attributes:
    count: number of real rows, float32 `[]`.
    mean: their mean, float32 `[]`.
    deviations: sum of squared deviations from the mean, float32 `[]`.
  """

  count: Leaf
  mean: Leaf
  deviations: Leaf

  @classmethod
  def from_values(
    cls, values: Float[Array, ' B'], mask: Float[Array, ' B']
  ) -> 'Variance':
    """Counts the rows with mask 1; what the others hold, even NaN, is lost."""
    count = _count(mask)
    mean = _kept(values, mask, 0.0).sum() / count.clip(1.0)
    deviations = _kept(jnp.square(values - mean[None]), mask, 0.0).sum()
    return cls(count=count, mean=mean, deviations=deviations)

  def reduce(self) -> 'Variance':
    """See `Metric.reduce`."""
    count = self.count.sum(0)
    mean = (self.count * self.mean).sum(0) / count.clip(1.0)
    between = (self.count * (self.mean - mean[None]) ** 2).sum(0)
    return Variance(
      count=count, mean=mean, deviations=self.deviations.sum(0) + between
    )

  def compute(self) -> float:
    """The variance (divisor: count), or NaN without rows."""
    return _ratio(self.deviations, self.count)


@flax.struct.dataclass
class Minimum(Metric):
  """Smallest value over real rows.

  Attributes:
    value: float32 `[]`, +inf without rows.
  """

  value: Leaf

  @classmethod
  def from_values(
    cls, values: Float[Array, ' B'], mask: Float[Array, ' B']
  ) -> 'Minimum':
    """Looks at the rows with mask 1."""
    return cls(value=_kept(values, mask, math.inf).min(initial=math.inf))

  def reduce(self) -> 'Minimum':
    """See `Metric.reduce`."""
    return Minimum(value=self.value.min(0))

  def compute(self) -> float:
    """The minimum, or NaN without rows."""
    value = float(self.value)
    return math.nan if value == math.inf else value


@flax.struct.dataclass
class Maximum(Metric):
  """Largest value over real rows.

  Attributes:
    value: float32 `[]`, -inf without rows.
  """

  value: Leaf

  @classmethod
  def from_values(
    cls, values: Float[Array, ' B'], mask: Float[Array, ' B']
  ) -> 'Maximum':
    """Looks at the rows with mask 1."""
    return cls(value=_kept(values, mask, -math.inf).max(initial=-math.inf))

  def reduce(self) -> 'Maximum':
    """See `Metric.reduce`."""
    return Maximum(value=self.value.max(0))

  def compute(self) -> float:
    """The maximum, or NaN without rows."""
    value = float(self.value)
    return math.nan if value == -math.inf else value


@flax.struct.dataclass
class Union(Metric):
  """Share of `C` things seen at least once, e.g. bank tokens read.

  Attributes:
    flags: which were seen, bool `[C]`.
  """

  flags: Leaf

  @classmethod
  def from_values(
    cls, values: Bool[Array, 'B C'], mask: Float[Array, ' B']
  ) -> 'Union':
    """What the rows with mask 1 have seen."""
    return cls(flags=(values & (mask > 0)[:, None]).any(0))

  def reduce(self) -> 'Union':
    """See `Metric.reduce`."""
    return Union(flags=self.flags.any(0))

  def compute(self) -> float:
    """The share in [0, 1], or NaN if there is nothing to see (C = 0)."""
    flags = np.asarray(self.flags)
    return _ratio(flags.sum(), flags.size)


def compute(metrics: Mapping[str, Metric]) -> dict[str, float]:
  """Fetches metrics in one transfer and computes each."""
  return {k: m.compute() for k, m in jax.device_get(dict(metrics)).items()}


def merge_on_host(
  merged: dict[str, Metric] | None, state: Mapping[str, Metric]
) -> dict[str, Metric]:
  """Adds a batch's metrics to those of the batches before, in float64.

  Args:
    merged: what this function returned before, or None at the start.
    state: metrics of one batch, on the devices.
  """
  fetched = jax.tree.map(_widened, jax.device_get(dict(state)))
  if merged is None:
    return fetched
  pairs = jax.tree.map(lambda a, b: np.stack((a, b)), merged, fetched)
  return {name: pair.reduce() for name, pair in pairs.items()}


def _widened(leaf: Leaf) -> np.ndarray:
  leaf = np.asarray(leaf)
  return leaf if leaf.dtype == bool else leaf.astype(np.float64)


def _kept(
  values: Float[Array, ' B'], mask: Float[Array, ' B'], otherwise: float
) -> Float[Array, ' B']:
  """Values in float32 with those of padding rows replaced."""
  # where, not a product: 0 * NaN is NaN.
  values = values.astype(jnp.float32)
  return jnp.where(mask > 0, values, jnp.full_like(values, otherwise))


def _count(mask: Float[Array, ' B']) -> Float[Array, '']:
  return (mask > 0).astype(jnp.float32).sum()


def _ratio(total: Leaf, count: Leaf) -> float:
  return float(total) / float(count) if float(count) else math.nan
