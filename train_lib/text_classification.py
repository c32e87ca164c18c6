"""Classification and regression of sentences and pairs of sentences.

A model takes `(tokens, token_types, length, row_keys=...)`, and may return
logits of several heads, `out['exits']` `[E, B, O]`.
"""

import pathlib

import jax.numpy as jnp
from jaxtyping import Array, Float

from eval_lib.metrics import Average
from model_lib import sizes
from train_lib.classification import Classification
from train_lib.terms import Batch, Forward, Metrics


class TextClassification(Classification):
  """Cross-entropy of the last head; squared error if there is one class.

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
    """Returns cross-entropy in nats, or squared errors of a regression."""
    if self.is_regression:
      return jnp.square(logits[:, 0].astype(jnp.float32) - batch['label'])
    return super().cross_entropy(logits, batch)

  def metrics(self, forward: Forward) -> Metrics:
    """Returns metrics of a classification, or the squared error."""
    if not self.is_regression:
      return super().metrics(forward)
    errors = self.cross_entropy(forward.logits, forward.batch)
    return {'squared_error': Average.from_values(errors, forward.batch['mask'])}
