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
