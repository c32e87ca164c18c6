"""The heads of an EAT, the layers they may stand at and where they do."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from model_lib import row_random
from model_lib.bert import Pooler
from model_lib.layers import classifier


class Head(nn.Module):
  """A pooler and a classifier on [CLS].

  Attributes:
    num_classes: width of the logits.
    activation: of the pooler.
    dropout: rate before the classifier.
    dtype: compute dtype of the pooler.
  """

  num_classes: int
  activation: str = 'tanh'
  dropout: float = 0.0
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, cls: Float[Array, 'B D'], row_keys: Key[Array, ' B'] | None = None
  ) -> Float[Array, 'B O']:
    """Logits of the rows, float32."""
    pooled = Pooler(self.activation, name='pooler', dtype=self.dtype)(cls)
    return classifier(self.num_classes)(
      row_random.drop(
        pooled.astype(jnp.float32), self.dropout, row_keys, 'classifier'
      )
    )


def check_layers(field: str, layers: Sequence[int], depth: int) -> None:
  """Raises ValueError unless the layers ascend within [1, depth]."""
  ascending = list(layers) == sorted(set(layers))
  if not ascending or not all(
    type(layer) is int and 1 <= layer <= depth for layer in layers
  ):
    raise ValueError(
      f'{field}: expected ascending layers in [1, {depth}], got {tuple(layers)}'
    )


def place_exits(depth: int, count: int) -> tuple[int, ...]:
  """Exit layers for a model of a depth: the paper's, 4, wherever it fits.

  A model of at most 4 layers has its exit in the middle. Several are
  neighbours, 3 and 4: rules that compare heads, those for regressions and
  patience, can then exit at the second.

  Args:
    depth: of the model.
    count: exits besides the last layer; there are fewer where they do not fit.
  """
  last = _last_exit(depth)
  return tuple(range(max(1, last - count + 1), last + 1))


def place_prunes(depth: int, count: int) -> tuple[int, ...]:
  """Pruning layers for a model of a depth: the paper's 2 and 4 if they fit.

  They divide the way to the exit evenly, the last one being at the exit.

  Args:
    depth: of the model.
    count: prunings; there are fewer where they do not fit.
  """
  last = _last_exit(depth)
  # Rounded up: after layer 0 there is nothing to prune.
  layers = {-(-last * number // count) for number in range(1, count + 1)}
  return tuple(sorted(layers - {0}))


def _last_exit(depth: int) -> int:
  """The layer of the last early exit; 0 if there is none."""
  return 4 if depth > 4 else depth // 2
