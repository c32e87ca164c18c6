"""Loss terms and metrics that tasks share."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Shaped

from eval_lib.metrics import Average, Maximum, Minimum, Variance
from train_lib.stages import Config


def adaptive_loss(
  name: str,
  cost: Float[Array, '...'],
  mask: Float[Array, '...'],
  denominator: Float[Array, ''],
  config: Config,
  knobs: Mapping[str, Any],
) -> Float[Array, '']:
  """Returns a weight times the masked sum of costs over a denominator.

  The ponder loss of Graves (2016), equation (14), and the tape loss of AdaTape
  (Algorithm 2). `name` is the weight's in `config.loss`, which a knob may
  override; costs are per row, or per input of a row.
  """
  weight = knobs.get(name, config['loss'][name])
  return weight * (cost * mask).sum() / denominator


def cross_entropy(
  logits: Float[Array, '*batch K'], labels: Int[Array, '*batch']
) -> Float[Array, '*batch']:
  """Returns softmax cross-entropies in nats, float32."""
  return optax.softmax_cross_entropy_with_integer_labels(
    logits.astype(jnp.float32), labels
  )


def average(
  values: Shaped[Array, '*axes'], mask: Float[Array, '*axes']
) -> Average:
  """Returns the mean over any number of axes."""
  return Average.from_values(values.astype(jnp.float32).ravel(), mask.ravel())


def row_statistics(
  name: str, values: Shaped[Array, ' B'], mask: Float[Array, ' B']
) -> dict[str, Any]:
  """Returns mean, variance, minimum and maximum of a value per row."""
  kinds = dict(mean=Average, variance=Variance, min=Minimum, max=Maximum)
  values = values.astype(jnp.float32)
  return {
    f'{name}_{key}': kind.from_values(values, mask)
    for key, kind in kinds.items()
  }
