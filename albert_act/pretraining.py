"""Pretraining of ALBERT: masked words, sentence order, ponder cost.

`L_sop + L_mlm + tau P` (Simoulin and Crabbe 2021, equation 8), with `P = sum_t
N_t + R_t` over the real tokens of a row (7).
"""

import dataclasses
import pathlib

import jax.numpy as jnp
import optax

from albert_act import token_kinds
from albert_act.model import AlbertPretraining
from albert_act.task import ITERATIONS, depths, ponder_cost
from core.errors import ConfigError
from dataset_lib import tokenizer
from eval_lib.metrics import Average
from train_lib.classification import check_sizes
from train_lib.run_directory import TOKENIZER
from train_lib.task import Task, complete_model, construct
from train_lib.terms import Term, Weight
from train_lib.text_classification import TextClassification

_INIT_LENGTH = 8
INPUTS = 'tokens', 'token_types', 'length', 'mlm_positions'  # of the model


class Pretraining(Task):
  """Masked words and sentence order, with halting or at a fixed depth.

  `model` is an `AlbertPretraining`, data are of `dataset_lib.pretraining`.
  """

  @dataclasses.dataclass(frozen=True)
  class Loss:
    """Legal fields of `loss`; `ponder_weight` is tau."""

    ponder_weight: Weight = 0.0
    sop_weight: Weight = 1.0

  MODEL = AlbertPretraining
  DECAY = TextClassification.DECAY
  KNOBS = ('ponder_weight',)
  PANELS = (
    ('Masked words, sentence order', '%', 100.0,
     {'mlm_accuracy': 'masked words', 'sop_accuracy': 'sentence order'}),
    ITERATIONS,
  )  # fmt: skip

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
    config['model'] = complete_model(model, cls.MODEL)

  def build_model(self):
    """The configured module, large enough for the data set."""
    model = construct(self.config, num_classes=2)
    least = self.info.input_shape[0]
    if model.max_positions < least:  # the rows of a corpus have one length
      expected = f'at least {least}, which the corpus needs'
      raise ConfigError('model.max_positions', model.max_positions, expected)
    check_sizes(model, self.info)
    return model

  def example(self):
    """A short row; see `Task.example`."""
    row = jnp.zeros((1, _INIT_LENGTH), jnp.int32)
    length = jnp.full((1,), _INIT_LENGTH, jnp.int32)
    return dict(zip(INPUTS, (row, row, length, row[:, :1]), strict=True))

  def arguments(self, batch):
    """The rows, and the places of the masked words."""
    return tuple(batch[name] for name in INPUTS)

  def save_assets(self, directory: pathlib.Path) -> None:
    """Writes the tokenizer of the corpus to the directory of the run."""
    corpus = self.config['dataset'].get('directory', '')
    if corpus:
      tokenizer.load(corpus).save(directory / TOKENIZER)

  def masks(self, batch):
    """Real rows `[B]` and their masked words `[B, P]`; see `Task.masks`."""
    rows = batch['mask']
    return {'rows': rows, 'words': batch['mlm_weights'] * rows[:, None]}

  def terms(self, forward):
    """Returns the terms of equation (8); see `Task.terms`.

    `ponder_share` is the share of the ponder cost in the loss. The paper
    chooses tau so that it is about 10 %.
    """
    logits, batch = forward.logits, forward.batch
    mlm_loss, sop_loss = (
      optax.softmax_cross_entropy_with_integer_labels(
        logits[name].astype(jnp.float32), batch[labels]
      )
      for name, labels in (('words', 'mlm_labels'), ('order', 'label'))
    )
    return (
      Term(mlm_loss, over='words', name='mlm_loss'),
      Term(sop_loss, 'sop_weight', name='sop_loss'),
      ponder_cost(forward, 'ponder_weight', share='ponder_share'),
    )

  def metrics(self, forward):
    """Accuracies and iterations, in evaluation by kind of token."""
    logits, batch = forward.logits, forward.batch
    hits = logits['words'].argmax(-1) == batch['mlm_labels']
    order_hits = logits['order'].argmax(-1) == batch['label']
    metrics = depths(forward) | {
      'mlm_accuracy': Average.from_values(hits, forward.masks['words']),
      'sop_accuracy': Average.from_values(order_hits, forward.masks['rows']),
    }
    if forward.training:
      return metrics
    steps = forward.out['ponder']['steps']
    return metrics | token_kinds.means('iterations', steps, batch)

  def flops(self) -> float:
    """FLOPs of one row at the most iterations, the words included."""
    length = self.info.input_shape[0]
    share = self.config['dataset'].get('mask_share', 0.0)
    return self.model.flops((length,), predictions=int(share * length))
