"""Models of 8 symbols that break the contract, each in its own way."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from train_lib.classification import Classification


class Right(nn.Module):
  """Keeps the contract; the others change one thing."""

  num_classes: int
  width: int = 8
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, tokens, row_keys=None):
    x = jax.nn.one_hot(tokens, 3, dtype=self.dtype).reshape(len(tokens), -1)
    x = self.middle(
      nn.relu(nn.Dense(self.width, dtype=self.dtype)(x)), row_keys
    )
    return self.result(nn.Dense(self.num_classes)(x), x)

  def middle(self, x, row_keys):
    return x

  def result(self, logits, x):
    return logits, {'features': x, 'steps': jnp.int32(1)}


class Bare(nn.Module):
  """Has no fields, takes no keys."""

  @nn.compact
  def __call__(self, tokens):
    return nn.Dense(2)(tokens), {}


class Alone(Right):
  def result(self, logits, x):
    return logits


class Three(Right):
  def result(self, logits, x):
    return logits, x, {}


class NoDict(Right):
  def result(self, logits, x):
    return logits, None


class Sum(Right):
  def result(self, logits, x):
    return logits.sum(-1), {}


class Half(Right):
  def result(self, logits, x):
    return logits.astype(self.dtype), {}


class Mean(Right):
  def result(self, logits, x):
    return logits, {'cost': x.mean()}


class Normalized(Right):
  def middle(self, x, row_keys):
    return x - x.mean(0, keepdims=True)


class Noisy(Right):
  def middle(self, x, row_keys):
    if row_keys is None:
      return x
    return x + jax.random.normal(row_keys[0], x.shape)


class Root(Right):
  """The derivative of a root is infinite where a row is 0."""

  def middle(self, x, row_keys):
    return x + jnp.sqrt(0.0 * x)


class Broken(Right):
  def middle(self, x, row_keys):
    return x @ self.nothing


class Two(Normalized, Mean):
  """Two mistakes."""


class Frozen(Right):
  def middle(self, x, row_keys):
    return jax.lax.stop_gradient(x)


class WrongTask(Classification):
  def metrics(self, forward):
    return {'cost': forward.out['costs']}


class Padded(nn.Module):
  """Averages a text over its padding too."""

  num_classes: int
  vocab_size: int = 50
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, tokens, token_types, length, row_keys=None):
    x = nn.Embed(self.vocab_size, 8, dtype=self.dtype)(tokens).mean(1)
    return nn.Dense(self.num_classes)(x), {}
