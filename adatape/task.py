"""Classification with a tape loss (AdaTape, section 2.4), or a ponder cost."""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp

from adatape.model import TapeClassifier
from adatape.universal import Pondering
from eval_lib.metrics import Union, row_statistics
from train_lib.classification import Classification
from train_lib.multi_label import MultiLabel
from train_lib.terms import Term, Weight

SHARES = (0.9, 0.75, 0.6, 0.45, 0.3)  # of the threshold, for a certificate


class TapeClassification(Classification):
  """Adds the tape loss; logs tape lengths, and evaluates the bank's use."""

  MODEL = TapeClassifier
  SERVE = 'adatape.chain:serve'
  PANELS = (('Tape length', 'tape tokens', 1.0, {'tape_length_mean': 'mean'}),)

  @dataclasses.dataclass(frozen=True)
  class Loss(Classification.Loss):
    """Legal fields of `loss`; the loss has `tape_weight * mean_b(l)`."""

    tape_weight: Weight = 0.0

  KNOBS = ('tape_weight',)

  def terms(self, forward):
    """Returns also the tape loss."""
    loss = forward.out['tape']['loss']
    term = Term(loss, 'tape_weight', name='tape_loss')
    return *super().terms(forward), term

  def metrics(self, forward):
    """Returns also tape lengths, in evaluation the share of the bank read."""
    metrics, tape = super().metrics(forward), forward.out['tape']
    mask = forward.masks['rows']
    metrics |= row_statistics('tape_length', tape['length'], mask)
    if forward.training or tape['indices'] is None:
      return metrics
    size, read = tape['bank_size'], (tape['mask'] * mask[:, None]) > 0
    # Indices of unused picks are set out of range; the scatter drops them.
    places = jnp.where(read[..., None], tape['indices'], size).reshape(-1)
    # It gathers all rows' picks, so training does without.
    flags = jnp.zeros((size,), bool).at[places].set(True, mode='drop')
    return metrics | {'bank_share': Union(flags)}

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
    length, indices = out['tape']['length'], out['tape']['indices']
    full = jnp.full(length.shape, self.flops())
    result = {'tape_length': length, 'full_flops': full}
    return result if indices is None else result | {'tape_indices': indices}

  def cheaper(self):
    """Returns smaller halting thresholds; see `Task.cheaper`."""
    reading = self.model.reading()
    adapts = reading and not reading.fixed_length
    shares = SHARES if adapts else ()
    return tuple({'threshold': share * reading.threshold} for share in shares)


class PonderClassification(Classification):
  """Cross-entropy + ponder cost; logs steps and depth."""

  MODEL: ClassVar[type[nn.Module]] = Pondering
  PANELS = (('Ponder steps', 'steps', 1.0, {'ponder_steps_mean': 'mean'}),)

  @dataclasses.dataclass(frozen=True)
  class Loss(Classification.Loss):
    """Legal fields of `loss`."""

    ponder_weight: Weight = 0.0

  KNOBS: ClassVar[tuple[str, ...]] = ('ponder_weight',)

  def terms(self, forward):
    """Returns also the ponder cost."""
    cost = forward.out['ponder']['cost']
    term = Term(cost, 'ponder_weight', name='ponder_cost')
    return *super().terms(forward), term

  def metrics(self, forward):
    """Returns also the steps of rows."""
    ponder, mask = forward.out['ponder'], forward.masks['rows']
    steps = row_statistics('ponder_steps', ponder['steps'], mask)
    depth = row_statistics('halting_depth', ponder['depth'], mask)
    return super().metrics(forward) | steps | depth

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
