"""ALBERT for classification, and for pretraining on words and order."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from albert_act.encoder import Albert, Encoded
from core.errors import ConfigError
from model_lib import flops, row_random
from model_lib.bert import INIT, Pooler
from model_lib.layers import ACTIVATIONS, LayerNorm, build, classifier
from model_lib.logical import constrain, partitioned, partitioned_dense
from model_lib.row_random import RowKeys


class AlbertClassifier(Albert):
  """ALBERT with a pooler and a classifier on [CLS]; fields of `Albert`."""

  def setup(self):
    """Declares encoder, pooler and head."""
    super().setup()
    self.pooler = Pooler('tanh', dtype=self.dtype)
    self.head = classifier(self.num_classes)

  def __call__(
    self,
    tokens: Int[Array, 'B L'],
    token_types: Int[Array, 'B L'],
    length: Int[Array, ' B'],
    row_keys: RowKeys = None,
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies rows of token ids; arguments as in `Albert.encode`.

    `out` has the pooled [CLS] 'features' `[B, D]`, float32, and 'ponder' of
    `Encoded`. By a rule that reads every step, unless `dynamic`, also the
    logits 'step_logits' `[N, B, O]` and the probabilities 'halting' `[N, B]`.
    """
    every = self.rule.EVERY_STEP and not self.dynamic
    trace = (lambda visit: visit.after[:, 0]) if every else None
    encoded = self.encode(tokens, token_types, length, row_keys, trace)
    logits, features = self.classify(encoded.states[:, 0], row_keys)
    out = {'features': features, 'ponder': encoded.ponder}
    if every:
      every_step = [self.classify(cls, row_keys)[0] for cls in encoded.trace]
      scores: Any = self.score(encoded.trace.astype(jnp.float32))
      out['halting'] = self.rule.distribution(jax.nn.sigmoid(scores[..., 0]))
      out['step_logits'] = jnp.stack(every_step)
    return logits, out

  @nn.nowrap
  def flops(
    self, input_shape: tuple[int, ...], iterations: float | int | None = None
  ) -> float:
    """Returns the FLOPs of one row `[L]`; see `Albert.encoder_flops`."""
    head = flops.dense(1, self.width, self.width + self.num_classes)
    return self.encoder_flops(input_shape[0], iterations) + head


class MaskedWords(nn.Module):
  """ALBERT's head for masked words, tied to the word embeddings."""

  activation: str
  norm_epsilon: float
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, states: Float[Array, 'B P D'], table: Float[Array, 'V E']
  ) -> Float[Array, 'B P V']:
    """Returns float32 logits of the masked tokens for a table of words."""
    vocab_size, width = table.shape
    hidden = partitioned_dense(
      width, 'embed', None, 'hidden', kernel_init=INIT, dtype=self.dtype
    )
    x = ACTIVATIONS[self.activation](hidden(states))
    x = LayerNorm(self.dtype, self.norm_epsilon, name='norm')(x)
    zeros = partitioned(nn.initializers.zeros, 'classes')
    bias = self.param('bias', zeros, (vocab_size,))
    table, kind = table.astype(self.dtype), jnp.float32
    logits = jnp.einsum('bpe,ve->bpv', x, table, preferred_element_type=kind)
    return constrain(logits + bias[None, None], 'batch', None, 'classes')


class AlbertPretraining(Albert):
  """ALBERT with heads for masked words and sentence order; see `Albert`.

  No rule that reads every step: its loss would predict the words in each.
  """

  def __post_init__(self):
    super().__post_init__()
    if self.rule.EVERY_STEP:
      rule = type(self.rule).__name__
      raise ConfigError('rule', rule, 'a rule whose loss reads the last step')

  def setup(self):
    """Declares encoder, pooler and both heads."""
    super().setup()
    self.pooler = Pooler('tanh', dtype=self.dtype)
    self.predictions = build(MaskedWords, self)
    self.sop = classifier(2, 'sop')

  def __call__(
    self,
    tokens: Int[Array, 'B L'],
    token_types: Int[Array, 'B L'],
    length: Int[Array, ' B'],
    positions: Int[Array, 'B P'],
    row_keys: RowKeys = None,
  ) -> tuple[dict[str, Array], dict[str, Any]]:
    """Predicts the words at `positions` and the order of the two segments.

    Returns ({'words': `[B, P, V]`, 'order': `[B, 2]`}, out) with 'features'
    `[B, D]`, all float32, and 'ponder' of `Encoded`.
    """
    encoded: Encoded = self.encode(tokens, token_types, length, row_keys)
    states = encoded.states
    features = self.pooler(states[:, 0]).astype(jnp.float32)
    table: Any = self.embeddings.get_variable('params', 'word')['embedding']
    places = positions[:, :, None]
    masked = jnp.take_along_axis(states, places, axis=1, mode='clip')
    rate = self.classifier_dropout
    dropped = row_random.drop(features, rate, row_keys, 'order')
    word_logits = self.predictions(masked, nn.meta.unbox(table))
    logits = {'words': word_logits, 'order': self.sop(dropped)}
    return logits, {'features': features, 'ponder': encoded.ponder}

  @nn.nowrap
  def flops(
    self,
    input_shape: tuple[int, ...],
    iterations: float | int | None = None,
    predictions: int = 0,
  ) -> float:
    """Returns the FLOPs of one row `[L]` with `predictions` masked words."""
    mlm_head = flops.dense(predictions, self.width, self.embedding_width)
    mlm_head += flops.dense(predictions, self.embedding_width, self.vocab_size)
    head = flops.dense(1, self.width, self.width + 2)
    return self.encoder_flops(input_shape[0], iterations) + mlm_head + head
