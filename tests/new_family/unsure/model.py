"""A linear model."""

import flax.linen as nn
import jax


class Linear(nn.Module):
  """Classifies rows of symbols."""

  num_classes: int
  dtype: str = 'float32'

  @nn.compact
  def __call__(self, tokens, row_keys=None):
    features = jax.nn.one_hot(tokens, 3).reshape(len(tokens), -1)
    return nn.Dense(self.num_classes)(features), {'features': features}
