"""Classification of images or texts that have several labels."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from core.errors import ConfigError
from train_lib.classification import Classification
from train_lib.terms import Batch
from train_lib.text_classification import TextClassification


class MultiLabel(Classification):
  """Sigmoid cross-entropy summed over the classes, as ViT on JFT.

  Labels are class ids, int32 `[B, max_labels]` padded with -1. With the losses
  of a family: `class Mine(MultiLabel, TapeClassification)`.
  """

  MULTI_LABEL = True

  @classmethod
  def validate_config(cls, config):
    """Also refuses label smoothing; see `Task.validate_config`."""
    super().validate_config(config)
    if smoothing := config['loss']['label_smoothing']:
      expected = '0: a sigmoid of each class is trained on its labels'
      raise ConfigError('loss.label_smoothing', smoothing, expected)

  def cross_entropy(
    self, logits: Float[Array, 'B K'], batch: Batch
  ) -> Float[Array, ' B']:
    """Returns the sum over the classes of each row in nats, float32."""
    # Ids of -1 are rows of zeros.
    targets = jax.nn.one_hot(self._labels(batch), logits.shape[-1]).max(1)
    losses = optax.sigmoid_binary_cross_entropy(
      logits.astype(jnp.float32), targets
    )
    return losses.sum(-1)

  def correct(self, predicted, batch):
    """Returns True where a label is predicted: accuracy is precision@1."""
    return (predicted[:, None] == self._labels(batch)).any(-1)

  def _labels(self, batch: Batch) -> Int[Array, 'B M']:
    """Returns the labels; data of one label a row are evaluated, too."""
    return batch['label'].reshape(len(batch['label']), -1)


class MultiLabelTexts(MultiLabel, TextClassification):
  """Texts with several labels, by a model of one head."""
