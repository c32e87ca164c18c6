"""Classification with the losses and metrics of adaptive computation.

`TapeClassification` adds `lambda * mean_b(l)` of Adaptive Tape Reading
(AdaTape, section 2.4), `PonderClassification` the ponder cost of the Universal
Transformer (Algorithm 1). The weight is a field of `loss`, or a knob.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp

from adatape import serving
from adatape.model import TapeClassifier
from adatape.serving import TapeChain, tape_lengths
from adatape.universal import Pondering
from core import fields
from eval_lib import certificate
from eval_lib.metrics import Average, Union, row_statistics
from serve_lib.chain import NO_RUN
from serve_lib.policies import TapePolicy
from train_lib.classification import Classification
from train_lib.multi_label import MultiLabel
from train_lib.task import Weight

SHARES = (0.9, 0.75, 0.6, 0.45, 0.3)  # of the threshold, for a certificate


class TapeClassification(Classification):
  """Adds the tape loss; logs tape lengths, and evaluates the bank's use."""

  MODEL = TapeClassifier

  @dataclasses.dataclass(frozen=True)
  class Loss(Classification.Loss):
    """Legal fields of `loss`; `tape_weight` is lambda."""

    tape_weight: Weight = 0.0

  KNOBS = ('tape_weight',)

  def extra_loss(self, out, batch, norm, knobs):
    """The tape loss of the real rows; see `Classification.extra_loss`."""
    tape, mask = out['tape'], batch['mask']
    loss = self.adaptive_loss('tape_weight', tape['loss'], mask, norm, knobs)
    metrics = row_statistics('tape_length', tape['length'], mask)
    metrics['tape_loss'] = Average.from_values(tape['loss'], mask)
    return loss, metrics

  def eval_metrics(self, out, batch):
    """The share of bank tokens read; its scatter gathers all rows' picks."""
    tape = out['tape']
    if tape['indices'] is None:
      return {}
    size, read = tape['bank_size'], (tape['mask'] * batch['mask'][:, None]) > 0
    # Indices of unused picks are set out of range; the scatter drops them.
    places = jnp.where(read[..., None], tape['indices'], size).reshape(-1)
    flags = jnp.zeros((size,), bool).at[places].set(True, mode='drop')
    return {'bank_share': Union(flags)}

  def row_flops(self, out):
    """FLOPs with the tapes as they are; see `Classification.row_flops`."""
    lengths = range(self.model.max_steps + 1)
    costs = [self.model.flops(self.info.input_shape, n) for n in lengths]
    return jnp.asarray(costs, jnp.float32)[out['tape']['length']]

  def row_counts(self, out):
    """Returns what the tape of a row took.

    'tape_length' int32 `[B]`, 'full_flops' float32 `[B]` of a tape of T tokens,
    'tape_indices' int32 `[B, T, K]` (not without a bank).
    """
    tape = out['tape']
    full = jnp.full(tape['length'].shape, self.flops())
    result = {'tape_length': tape['length'], 'full_flops': full}
    if tape['indices'] is not None:
      result['tape_indices'] = tape['indices']
    return result

  def cheaper(self):
    """Returns smaller halting thresholds; see `Task.cheaper`."""
    reading = self.model.reading()
    if reading is None or reading.fixed_length:
      return ()
    return tuple({'threshold': share * reading.threshold} for share in SHARES)

  def prepare_serving(self, options, run=NO_RUN):
    """Serves in two stages: read the tape, then encode.

    `run.lengths` are tape buckets; options: `adatape.serving.Options`. See
    `Task.prepare_serving`.
    """
    given = serving.Options(**fields.check(serving.Options, options, 'serve'))
    lengths = tape_lengths(self.model.max_steps, run.lengths)
    reader = self.item_reader(lengths[-1])

    def serve(variables):
      certified = given.setting, run, self.model, variables, serving.VARIANT
      others, known = certificate.serve(*certified)
      chain = TapeChain(self.model, variables, reader, self.inputs, others)
      known['several'] = self.MULTI_LABEL
      return chain, TapePolicy(
        chain, reader, self.label_names, lengths, **known
      )

    return serve


class PonderClassification(Classification):
  """Cross-entropy + ponder cost; logs steps and depth."""

  MODEL: ClassVar[type[nn.Module]] = Pondering

  @dataclasses.dataclass(frozen=True)
  class Loss(Classification.Loss):
    """Legal fields of `loss`."""

    ponder_weight: Weight = 0.0

  KNOBS: ClassVar[tuple[str, ...]] = ('ponder_weight',)

  def extra_loss(self, out, batch, norm, knobs):
    """The ponder cost of the real rows; see `Classification.extra_loss`."""
    ponder, mask = out['ponder'], batch['mask']
    cost = ponder['cost']
    loss = self.adaptive_loss('ponder_weight', cost, mask, norm, knobs)
    metrics = row_statistics('ponder_steps', ponder['steps'], mask)
    metrics |= row_statistics('halting_depth', ponder['depth'], mask)
    metrics['ponder_cost'] = Average.from_values(cost, mask)
    return loss, metrics

  def row_flops(self, out):
    """FLOPs to the last halt of a row; see `Classification.row_flops`."""
    return self.flops_of_steps(out['ponder']['depth'])

  def row_counts(self, out):
    """The mean steps of a row's tokens, and the steps to its last halt."""
    return {name: out['ponder'][name] for name in ('steps', 'depth')}


class TapeMultiLabel(MultiLabel, TapeClassification):
  """Several labels per image, as on JFT-300M, and the tape loss."""


class PonderMultiLabel(MultiLabel, PonderClassification):
  """Several labels per image, as on JFT-300M, and the ponder cost."""
