"""Metrics of `clu.metrics` whose sums over batches and devices are exact.

States are built inside a jitted step and merge in any order and grouping, so
padding, unequal batches and micro-batches count as in one pass over the data.
They reduce a stacked axis in one operation and compute on the host, because a
division on the device would wait for queued steps. Any other metric of clu can
be used, but `clu.metrics.Std` loses all digits when the mean is large.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import clu.metrics
import flax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

Leaf = Any  # an array of any kind: scan, eval_shape and device_get pass trees
Values = Shaped[Array, '*axes']
# Of a task that classifies: the mean over the classes, a `ByClass`.
CLASS_ACCURACY = 'class_accuracy'
_MOST = 100  # states of `Collected` before they are merged


class Metric(clu.metrics.Metric):
  """A metric whose states are merged along a leading axis by `reduce`.

  `from_values(values, mask)` counts the values with mask 1; the others may be
  anything, even NaN. `compute` returns NaN without values.
  """

  def merge(self, other: Any) -> Any:
    """Returns the state of the data of both metrics."""
    return jax.tree.map(lambda a, b: jnp.stack((a, b)), self, other).reduce()

  def reduce(self) -> Any:
    """Returns the sums over the leading axis."""
    return jax.tree.map(lambda leaf: leaf.sum(0), self)


@flax.struct.dataclass
class Average(Metric):
  """Mean: float32 `total` `[]` and `count` `[]`."""

  total: Leaf
  count: Leaf

  @classmethod
  def from_values(cls, values: Values, mask: Values) -> 'Average':
    """See `Metric`."""
    return cls(_kept(values, mask, 0.0).sum(), _count(mask))

  def compute(self) -> float:
    """Returns the mean."""
    return _ratio(self.total, self.count)


@flax.struct.dataclass
class Variance(Metric):
  """Population variance.

  States merge by Chan, Golub and LeVeque, "Updating formulae and a pairwise
  algorithm for computing sample variances" (1979).
  """

  count: Leaf
  mean: Leaf
  deviations: Leaf  # sum of squared deviations from the mean

  @classmethod
  def from_values(cls, values: Values, mask: Values) -> 'Variance':
    """See `Metric`."""
    count, kept = _count(mask), _kept(values, mask, 0.0)
    mean = kept.sum() / count.clip(1.0)
    squares = _kept(jnp.square(kept - mean[None]), mask.ravel(), 0.0)
    return cls(count, mean, squares.sum())

  def reduce(self) -> 'Variance':
    """See `Metric`."""
    count = self.count.sum(0)
    mean = (self.count * self.mean).sum(0) / count.clip(1.0)
    between = (self.count * (self.mean - mean[None]) ** 2).sum(0)
    return Variance(count, mean, self.deviations.sum(0) + between)

  def compute(self) -> float:
    """Returns the variance (divisor: count)."""
    return _ratio(self.deviations, self.count)


@flax.struct.dataclass
class Maximum(Metric):
  """Largest value: float32 `[]`, -inf without values."""

  value: Leaf

  @classmethod
  def from_values(cls, values: Values, mask: Values) -> 'Maximum':
    """See `Metric`."""
    return cls(_kept(values, mask, -math.inf).max(initial=-math.inf))

  def reduce(self) -> 'Maximum':
    """Returns the maximum over the leading axis."""
    return type(self)(self.value.max(0))

  def compute(self) -> float:
    """Returns the value."""
    value = float(self.value)
    return math.nan if value == -math.inf else value


@flax.struct.dataclass
class Minimum(Maximum):
  """Smallest value, stored as the maximum of the negated values."""

  @classmethod
  def from_values(cls, values: Values, mask: Values) -> 'Minimum':
    """See `Metric`."""
    return super().from_values(-values, mask)

  def compute(self) -> float:
    """Returns the value."""
    return -super().compute()


@flax.struct.dataclass
class Union(Metric):
  """Share of `C` items seen at least once, e.g. bank tokens."""

  flags: Leaf  # bool `[C]`

  def reduce(self) -> 'Union':
    """See `Metric`."""
    return Union(self.flags.any(0))

  def compute(self) -> float:
    """Returns the share in [0, 1], or NaN if C = 0."""
    flags = np.asarray(self.flags)
    return _ratio(flags.sum(), flags.size)


@flax.struct.dataclass
class ByClass(Average):
  """Mean of the rows of each of K classes: float32 `total`, `count` `[K]`."""

  @classmethod
  def of(
    cls, values: Values, mask: Values, labels: Values, classes: int
  ) -> 'ByClass':
    """Returns the state of rows with mask 1, by their labels."""
    here = jax.nn.one_hot(labels, classes) * mask[:, None]
    return cls(values.astype(jnp.float32) @ here, here.sum(0))

  def means(self) -> list[float]:
    """Returns the mean of each class, NaN without rows."""
    return [*map(_ratio, self.total, self.count)]

  def compute(self) -> float:
    """Returns the mean over the classes that have rows."""
    means = [mean for mean in self.means() if not math.isnan(mean)]
    return _ratio(sum(means), len(means))


def row_statistics(
  name: str, values: Shaped[Array, ' B'], mask: Float[Array, ' B']
) -> dict[str, Metric]:
  """Returns mean, variance, minimum and maximum of a value per row."""
  kinds = dict(mean=Average, variance=Variance, min=Minimum, max=Maximum)
  return {
    f'{name}_{key}': kind.from_values(values, mask)
    for key, kind in kinds.items()
  }


def compute(metrics: Mapping[str, clu.metrics.Metric]) -> dict[str, float]:
  """Fetches metrics in one transfer and computes each."""
  fetched = jax.device_get(dict(metrics))
  return {name: float(metric.compute()) for name, metric in fetched.items()}


class Collected:
  """Metrics of batches that stay where they are until all are read.

  `saved` are the `numbers` of an earlier process, for its batches.
  """

  def __init__(self, saved: Sequence[Any] = ()):
    self._saved, self._states = saved, list[dict[str, Any]]()

  def add(self, state: Mapping[str, clu.metrics.Metric]) -> None:
    """Adds the metrics of a batch, the same each time."""
    leaves, shape = jax.tree.flatten(dict(state))
    if len(self._saved) == len(leaves):  # not of another version
      # Numbers that are not finite are strings in JSON.
      leaves = [np.asarray(leaf, np.float64) for leaf in self._saved]
      self._states.append(jax.tree.unflatten(shape, leaves))
    self._saved = ()
    self._states.append(dict(state))
    if len(self._states) > _MOST:
      self._states = [self.take()]

  def take(self) -> dict[str, Any]:
    """Fetches in one transfer, returns metrics merged in float64; restarts."""
    states, self._states = self._states, []
    first, *rest = jax.tree.map(_widened, jax.device_get(states))
    if not rest:
      return first
    stack = jax.tree.map(lambda *leaves: np.stack(leaves), first, *rest)
    return {name: metric.reduce() for name, metric in stack.items()}

  def numbers(self) -> list[Any]:
    """Returns the metrics for the next process, as JSON has them."""
    if not self._states:
      return [*self._saved]
    self._states = [self.take()]
    return [leaf.tolist() for leaf in jax.tree.leaves(self._states)]


def _widened(leaf: Leaf) -> np.ndarray:
  leaf = np.asarray(leaf)
  return leaf if leaf.dtype == bool else leaf.astype(np.float64)


def _kept(values: Values, mask: Values, otherwise: float) -> Float[Array, ' N']:
  """Returns float32 values `[N]`, with padding replaced."""
  # where, not a product: 0 * NaN is NaN.
  values = values.astype(jnp.float32).ravel()
  return jnp.where(mask.ravel() > 0, values, otherwise)


def _count(mask: Values) -> Float[Array, '']:
  return (mask.ravel() > 0).astype(jnp.float32).sum()


def _ratio(total: Leaf, count: Leaf) -> float:
  return float(total) / float(count) if float(count) else math.nan
