"""Classification and regression of sentences and pairs of sentences.

A model takes `(tokens, token_types, length, row_keys=...)`, and may return
logits of several heads, `out['exits']` `[E, B, O]`.
"""

import pathlib
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from core import registry
from eval_lib.metrics import Average
from train_lib.classification import Classification, checkpoint_fields
from train_lib.task import model_errors
from train_lib.terms import Batch, Forward, Metrics


class TextClassification(Classification):
  """Cross-entropy of the last head; squared error if there is one class.

  `model.from_checkpoint`, a run or a Hugging Face model, has default sizes.
  """

  SERVE = 'serve_lib.classifier:serve_texts'
  # BERT's recipe excludes only biases and LayerNorm.
  DECAY = r'(^|/)kernel$|(^|/)embeddings/(word|position|token_type)/embedding$'

  @classmethod
  def validate_config(cls, config: dict[str, Any]) -> None:
    """Also takes sizes from the checkpoint or the variant."""
    from model_lib.bert import TextEncoder

    model, known = dict(config['model']), dict[str, Any]()
    directory = model.pop('from_checkpoint', '')
    kind = registry.locate(model.get('name', ''), 'model.name')
    sizes = (kind if issubclass(kind, TextEncoder) else TextEncoder).SIZES
    if model.get('variant'):
      with model_errors(model):
        known = sizes.fields(model['variant'])
    if directory:
      known |= checkpoint_fields(directory, sizes.defaults)
    config['model'] = known | model
    super().validate_config(config)

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
