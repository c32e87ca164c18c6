"""Pretraining of ALBERT: masked words, sentence order, ponder cost.

`L_sop + L_mlm + tau P` (Simoulin and Crabbe 2021, equation 8), with `P = sum_t
N_t + R_t` over the real tokens of a row (7).
"""

import dataclasses
import pathlib
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array

from albert_act import analysis
from albert_act.model import AlbertPretraining
from albert_act.task import ponder_loss
from core.errors import ConfigError
from dataset_lib import tokenizer
from eval_lib.metrics import Average
from train_lib.run_directory import TOKENIZER
from train_lib.task import Task, Weight, complete_model, construct

_INIT_LENGTH = 8


class Pretraining(Task):
  """Masked words and sentence order, with halting or at a fixed depth.

  Configuration: `model` is an `AlbertPretraining`; default `vocab_size`: the
  corpus's. Batches are those of `dataset_lib.pretraining`.
  """

  @dataclasses.dataclass(frozen=True)
  class Loss:
    """Legal fields of `loss`; `ponder_weight` is tau."""

    ponder_weight: Weight = 0.0
    sop_weight: Weight = 1.0

  KNOBS = ('ponder_weight',)

  @classmethod
  def validate_config(cls, config) -> None:
    """Also reads `model.vocab_size` from the tokenizer of the corpus."""
    super().validate_config(config)
    model = dict(config['model'])
    if 'vocab_size' not in model:
      directory = config['dataset'].get('directory', '')
      file = pathlib.Path(directory).expanduser() / TOKENIZER
      if not (directory and file.is_file()):
        expected = 'a corpus that python -m launch.prepare_corpus has written'
        raise ConfigError('dataset.directory', directory, expected)
      model['vocab_size'] = tokenizer.load(file).vocab_size
    config['model'] = complete_model(model, AlbertPretraining)

  def build_model(self):
    """The configured module, large enough for the data set."""
    model = construct(self.config, num_classes=2)
    for field, given, least in (
      ('vocab_size', model.vocab_size, self.info.vocab_size),
      ('max_positions', model.max_positions, self.info.input_shape[0]),
    ):
      if given < least:
        expected = f'at least {least}, which the corpus needs'
        raise ConfigError(f'model.{field}', given, expected)
    return model

  def init(self, rng):
    """Initialises with one short row; see `Task.init`."""
    row = jnp.zeros((1, _INIT_LENGTH), jnp.int32)
    length = jnp.full((1,), _INIT_LENGTH, jnp.int32)
    variables = self.model.init(rng, row, row, length, row[:, :1])
    return variables['params'], {}

  def save_assets(self, directory: pathlib.Path) -> None:
    """Writes the tokenizer of the corpus to the directory of the run."""
    corpus = self.config['dataset'].get('directory', '')
    if corpus:
      tokenizer.load(corpus).save(directory / TOKENIZER)

  def apply(self, params, batch, row_keys=None):
    """Runs the model; see `AlbertPretraining`."""
    names = ('tokens', 'token_types', 'length', 'mlm_positions')
    inputs = [batch[name] for name in names]
    return self.model.apply({'params': params}, *inputs, row_keys)

  def normalizers(self, batch):
    """Real rows and masked words in the whole batch."""
    words = batch['mlm_weights'] * batch['mask'][:, None]
    return {
      'examples': jnp.maximum(batch['mask'].sum(), 1.0),
      'words': jnp.maximum(words.sum(), 1.0),
    }

  def loss(self, params, model_state, frozen, batch, norm, row_keys, knobs):
    """Loss of equation (8) for these rows, normalised by the whole batch."""
    logits, out = self.apply(params, batch, row_keys)
    loss, metrics = self._losses(logits, out, batch, norm, knobs)
    return loss, (metrics, model_state)

  def evaluate(self, params, model_state, batch):
    """Accuracies and losses without noise, iterations by kind of token."""
    logits, out = self.apply(params, batch)
    _, metrics = self._losses(logits, out, batch, self.normalizers(batch), {})
    steps = out['encoded'].ponder['steps']
    return metrics | analysis.means('iterations', steps, batch)

  def features(self, params, model_state, batch):
    """The pooled [CLS]."""
    return self.apply(params, batch)[1]['features']

  def _losses(
    self, logits, out, batch, norm, knobs
  ) -> tuple[Array, dict[str, Any]]:
    """The loss and its metrics; `ponder_share` is that of the ponder cost.

    The paper chooses tau so that this share is about 10 %: at the end of a run
    multiply tau by 0.1 / ponder_share. In evaluation tau is that of the last
    step, `loss.ponder_weight`.
    """
    mask = batch['mask']
    words = batch['mlm_weights'] * mask[:, None]
    words_logits, order_logits = (
      logits[name].astype(jnp.float32) for name in ('words', 'order')
    )
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    entropy = cross_entropy(words_logits, batch['mlm_labels'])
    hits = logits['words'].argmax(-1) == batch['mlm_labels']
    order = cross_entropy(order_logits, batch['label'])
    order_hits = logits['order'].argmax(-1) == batch['label']
    cost, metrics = ponder_loss(self, out['encoded'].ponder, batch, norm, knobs)
    loss = jnp.where(words > 0, entropy, 0.0).sum() / norm['words']
    sop_weight = self.config['loss']['sop_weight'] / norm['examples']
    loss += sop_weight * jnp.where(mask > 0, order, 0.0).sum() + cost
    average = Average.from_values
    metrics |= {
      'mlm_accuracy': average(hits, words),
      'mlm_loss': average(entropy, words),
      'sop_accuracy': average(order_hits, mask),
      'sop_loss': average(order, mask),
      'ponder_share': Average(jnp.asarray(cost, jnp.float32), loss),
    }
    return loss, metrics

  def flops(self) -> float:
    """FLOPs of one row at the most iterations, the words included."""
    length = self.info.input_shape[0]
    share = self.config['dataset'].get('mask_share', 0.0)
    return self.model.flops((length,), predictions=int(share * length))
