"""Models that break the contract, each in its own way."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from halting.token_rules import ACT
from train_lib.classification import Classification

# Features after a mistake of this name.
FEATURES = {
  'normalized': lambda model, x, keys: x - x.mean(0, keepdims=True),
  'two': lambda model, x, keys: x - x.mean(0, keepdims=True),
  'noisy': lambda model, x, keys: (
    x if keys is None else x + jax.random.normal(keys[0], x.shape)
  ),
  # The derivative of a root is infinite at 0.
  'root': lambda model, x, keys: x + jnp.sqrt(0.0 * x),
  'broken': lambda model, x, keys: x @ model.nothing,
  'frozen': lambda model, x, keys: jax.lax.stop_gradient(x),
}
# What it returns.
RESULTS = {
  'alone': lambda model, logits, x: logits,
  'three': lambda model, logits, x: (logits, x, {}),
  'no dict': lambda model, logits, x: (logits, None),
  'classes': lambda model, logits, x: (jnp.tile(logits, 2)[:, :3], {}),
  'sum': lambda model, logits, x: (logits.sum(-1), {}),
  'half': lambda model, logits, x: (logits.astype(model.dtype), {}),
  'mean': lambda model, logits, x: (logits, {'cost': x.mean()}),
  'two': lambda model, logits, x: (logits, {'cost': x.mean()}),
}


class Model(nn.Module):
  """An MLP of 8 symbols, right but for what `mistake` names."""

  num_classes: int
  mistake: str = ''
  width: int = 8
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, tokens, row_keys=None):
    x = jax.nn.one_hot(tokens, 3, dtype=self.dtype).reshape(len(tokens), -1)
    x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
    x = FEATURES.get(self.mistake, lambda _, x, keys: x)(self, x, row_keys)
    logits = nn.Dense(self.num_classes)(x)
    if self.mistake in RESULTS:
      return RESULTS[self.mistake](self, logits, x)
    return logits, {'features': x, 'steps': jnp.int32(1)}


class Bare(nn.Module):
  """Has no fields, takes no keys."""

  mistake: str = ''

  @nn.compact
  def __call__(self, tokens):
    return nn.Dense(2)(tokens), {}


class Padded(nn.Module):
  """Averages a text over its padding too."""

  num_classes: int
  mistake: str = ''
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, tokens, token_types, length, row_keys=None):
    x = nn.Embed(50, 8, dtype=self.dtype)(tokens).mean(1)
    return nn.Dense(self.num_classes)(x), {}


class Task(Classification):
  """Reads an entry that the model does not return."""

  def metrics(self, forward):
    return {'cost': forward.out['costs']}


@dataclasses.dataclass(frozen=True)
class Endless(ACT):
  """Forgets that a step is the last."""

  def step(self, state, evidence, is_last):
    return super().step(state, evidence, False)
