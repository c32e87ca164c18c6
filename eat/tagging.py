"""Tags of words, such as named entities, by an EAT that restores its tokens.

A pruned token keeps the state that it had when it was pruned, and one linear
head classifies all tokens, as in BERT (Devlin et al., 2019, section 5.3).
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from core.errors import ConfigError
from dataset_lib.tagged_words import IGNORED
from eat.model import EatClassifier
from eat.task import retention
from eval_lib import spans
from eval_lib.metrics import Average
from model_lib import flops, row_random
from model_lib.logical import constrain
from model_lib.row_random import RowKeys
from model_lib.tokens import Layers, restore
from train_lib.task import NO_RUN, Task
from train_lib.terms import Term
from train_lib.text_classification import TextClassification


class EatTagger(EatClassifier, kw_only=True):
  """`EatClassifier` with a head on every token, without pooler and exits."""

  exit_layers: Layers = dataclasses.field(default=(), init=False)
  restore: bool = dataclasses.field(default=True, init=False)

  def __call__(
    self,
    tokens: Int[Array, 'B L'],
    token_types: Int[Array, 'B L'],
    length: Int[Array, ' B'],
    row_keys: RowKeys = None,
    prune_scale: Float[Array, ''] | float = 1.0,
  ) -> tuple[Float[Array, 'B L O'], dict[str, Any]]:
    """Classifies the tokens of rows; arguments as of `EatClassifier`.

    Returns (logits, out): 'tokens' `[B, L, D]` restored, 'features' `[B, D]` of
    [CLS], and 'kept' `[B]` of each pruning.
    """
    start = self.embed(tokens, token_types, length, row_keys)
    options: Any = dict(row_keys=row_keys, prune_scale=prune_scale)
    encoded = self.run_blocks(start, 1, self.depth, **options)
    states = restore(encoded.full, encoded.tokens).astype(jnp.float32)
    rate = self.classifier_dropout
    logits = self.head(row_random.drop(states, rate, row_keys, 'classifier'))
    out = {'tokens': states, 'features': states[:, 0], 'kept': encoded.kept}
    return constrain(logits, 'batch', 'length', 'classes'), out

  @nn.nowrap
  def flops(self, input_shape: tuple[int, ...]) -> float:
    """Returns the FLOPs of one row of `L` tokens, pruned."""
    of_cls = flops.dense(1, self.width, self.width + self.num_classes)
    of_all = flops.dense(input_shape[0], self.width, self.num_classes)
    return super().flops(input_shape) - of_cls + of_all


class Tagging(TextClassification):
  """Mean cross-entropy of tagged words; knob `prune_scale` as in `FineTune`."""

  MODEL = EatTagger
  KNOBS = MODEL_KNOBS = ('prune_scale',)
  outputs = Task.outputs  # rows have no single label

  def masks(self, batch):
    """Returns also 'words': 1 for tokens with a tag, `[B, L]`."""
    tagged = (batch['label'] != IGNORED).astype(jnp.float32)
    words = tagged * batch['mask'][:, None]
    return super().masks(batch) | {'words': words}

  def terms(self, forward):
    """Returns the cross-entropy over the tagged tokens."""
    losses = self.target_loss(forward, forward.logits)
    return (Term(losses, over='words'),)

  def metrics(self, forward):
    """Returns metrics of tagged words; of tags as B-PER also F1 over spans."""
    batch, tags = forward.batch, forward.batch['label']
    words, predicted = forward.masks['words'], forward.logits.argmax(-1)
    losses = self.cross_entropy(forward.logits, batch)
    left_out = (batch['left_out'] * batch['mask']).sum()
    metrics = {
      'accuracy': Average.from_values(predicted == tags, words),
      'cross_entropy': Average.from_values(losses, words),
      'words_left_out': Average(left_out, left_out + words.sum()),
    }
    if scheme := spans.scheme(self.info.class_names):
      metrics['span_f1'] = spans.f1(predicted, tags, words > 0, scheme)
    return metrics | retention(forward)

  def prepare_serving(self, options, run=NO_RUN):
    """Raises ConfigError: an answer of the engine is one label of a row."""
    expected = 'a task with one label a row; launch.evaluate measures tags'
    raise ConfigError('task', 'eat.tagging:Tagging', expected)
