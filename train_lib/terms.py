"""Terms: a loss is a list of them, each a weight times a mean.

A new objective is one file, a Task whose `terms` reads what a `Forward` has, as
`patient` of CONTRIBUTING.md. Denominators are counted over the whole batch, so
that micro-batches and devices add up. `Classification.target_loss` mixes and
smooths the labels, for any logits.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import jax.numpy as jnp
from annotated_types import Interval
from jaxtyping import Array, Float

from core.errors import ConfigError
from eval_lib.metrics import Average, Metric

Batch = Mapping[str, Any]  # arrays, of JAX or NumPy
Tree = Any  # a pytree of arrays: parameters, statistics, a teacher
Metrics = dict[str, Metric]
Weight = Annotated[float, Interval(ge=0.0, le=1e3)]  # of a loss
# Batches whose labels are the targets, and the share of each: 1, or of mixup
# float32 `[B]`.
Targets = tuple[tuple[Any, Batch], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward:
  """One forward pass: what terms and metrics read."""

  logits: Any
  out: Mapping[str, Any]
  batch: Batch  # as the model read it
  targets: Targets
  masks: Mapping[str, Any]  # by name; see `Task.masks`
  settings: Mapping[str, Any]  # fields of `loss`, which knobs replace
  frozen: Tree = dataclasses.field(default_factory=dict)
  training: bool = False  # metrics of training need no communication


@dataclasses.dataclass(frozen=True)
class Term:
  """One part of a loss: `weight * sum(value * mask) / sum(of mask `per`)`."""

  value: Any  # of the shape of its mask, e.g. `[B]`
  # A number, an array [], or a name: a field of `loss`, or a knob. 0: only log.
  weight: Any = 1.0
  over: str = 'rows'  # the mask of the items that are summed
  per: str = ''  # the mask whose sum divides; '' for `over`
  name: str = ''  # of the metric, the mean of the values; '' for none
  share: str = ''  # of the metric, the share of the loss; '' for none


def total(
  terms: Iterable[Term], forward: Forward, norm: Mapping[str, Any]
) -> tuple[Float[Array, ''], Metrics]:
  """Returns the loss, and the metrics that its terms name.

  `norm`: the sum of each mask over the whole batch. Raises ConfigError for a
  value without the shape of its mask.
  """
  loss, shares, metrics = jnp.zeros(()), dict[str, Any](), dict[str, Any]()
  for term in terms:
    mask = forward.masks[term.over]
    if term.value.shape != mask.shape:
      expected = f'values {mask.shape} as the mask {term.over!r}'
      raise ConfigError(f'terms.{term.name}', term.value.shape, expected)
    if term.name:
      metrics[term.name] = Average.from_values(term.value, mask)
    weight = term.weight
    weight = forward.settings[weight] if isinstance(weight, str) else weight
    # where, not a product: 0 * NaN is NaN.
    value = jnp.asarray(term.value, jnp.float32)
    kept = jnp.where(mask > 0, value, 0.0) * mask
    part = weight * kept.sum() / norm[term.per or term.over]
    loss += part
    if term.share:
      shares[term.share] = jnp.asarray(part, jnp.float32)
  return loss, metrics | {k: Average(v, loss) for k, v in shares.items()}
