"""Classification and regression of sentences and pairs of sentences.

A model takes `(tokens, token_types, length, row_keys=...)`, and may return
logits of several heads, `out['exits']` `[E, B, O]`.
"""

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from eval_lib.metrics import Average
from model_lib import sizes
from train_lib.classification import Classification
from train_lib.optimizers import path_name
from train_lib.terms import Batch, Forward, Metrics, Tree

HEADS = r'(^|/)head/(kernel|bias)(/|$)'


class TextClassification(Classification):
  """Cross-entropy of the last head; squared error if there is one class.

  The squared error is divided by the variance of the labels of train, where the
  data tell it; heads begin at their mean, and as large as their deviation.

  `model.from_checkpoint`, a run or a Hugging Face model, has default sizes.
  """

  SERVE = 'serve_lib.classifier:serve_texts'
  SIZES = sizes.BERT
  # BERT's recipe excludes only biases and LayerNorm.
  DECAY = r'(^|/)kernel$|(^|/)embeddings/(word|position|token_type)/embedding$'

  def save_assets(self, directory: pathlib.Path) -> None:
    """Writes the tokenizer to the directory of the run."""
    from dataset_lib import tokenizer
    from train_lib.run_directory import TOKENIZER

    if path := self.config['dataset'].get('tokenizer', ''):
      tokenizer.load(path).save(directory / TOKENIZER)

  @property
  def is_regression(self) -> bool:
    """True if the label is a number instead of a class."""
    return self.info.num_classes == 1

  @property
  def scales(self) -> tuple[str, ...]:
    """See the base: steps of Adam have the size of the rate, not of labels."""
    spread = self.info.label_scale[1]
    return () if spread == 1.0 else (f'{HEADS}->{spread}',)

  def init(self, rng: Key[Array, '']) -> tuple[Tree, Tree]:
    """See the base."""
    params, state = super().init(rng)
    mean, spread = self.info.label_scale

    def scaled(path: Any, leaf: Array) -> Array:
      found = re.search(HEADS, path_name(path))
      return leaf if not found else spread * leaf + mean * (found[2] == 'bias')

    if self.is_regression:
      params = jax.tree_util.tree_map_with_path(scaled, params)
    return params, state

  def example(self) -> dict[str, Array]:
    """Returns one short row."""
    row = jnp.zeros((1, 8), jnp.int32)
    length = jnp.array([8], jnp.int32)
    return {'tokens': row, 'token_types': row, 'length': length}

  def arguments(self, batch: Batch) -> tuple[Array, ...]:
    """Returns the positional arguments of the model."""
    return batch['tokens'], batch['token_types'], batch['length']

  def cross_entropy(
    self, logits: Float[Array, '*B O'], batch: Batch
  ) -> Float[Array, '*B']:
    """Returns cross-entropy in nats, or scaled squared errors."""
    if self.is_regression:
      error = logits[:, 0].astype(jnp.float32) - batch['label']
      return jnp.square(error / self.info.label_scale[1])
    return super().cross_entropy(logits, batch)

  def metrics(self, forward: Forward) -> Metrics:
    """Returns metrics of a classification, or of a regression.

    These are `squared_error`, in the squared unit of the labels, and, where the
    data tell the variance of train, `explained`, the share of it that is no
    error: 0 for the mean of train as the answer to all.
    """
    if not self.is_regression:
      return super().metrics(forward)
    errors = self.cross_entropy(forward.logits, forward.batch)
    spread, mask = self.info.label_scale[1], forward.batch['mask']
    squares = Average.from_values(spread**2 * errors, mask)
    if self.info.label_scale == (0.0, 1.0):
      return {'squared_error': squares}
    explained = Average.from_values(1.0 - errors, mask)
    return {'squared_error': squares, 'explained': explained}
