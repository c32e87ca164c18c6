"""Fine-tuning of ALBERT with halting: cross-entropy, and ponder cost if wanted.

The paper fine-tunes without the ponder term; the published code uses it.
`loss.ponder_weight` is 0 by default.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from albert_act.model import AlbertClassifier
from albert_act.serving import VARIANT, AlbertChain, Options
from eval_lib import certificate
from eval_lib.metrics import Average
from model_lib import sizes
from serve_lib.policies import HaltingPolicy
from train_lib import expected_loss
from train_lib.task import Weight
from train_lib.text_classification import TextClassification


class FineTune(TextClassification):
  """Classification or regression of texts by an `AlbertClassifier`.

  `loss.ponder_weight`, or a knob of that name, is tau of the ponder cost `sum_t
  N_t + R_t` over the real tokens of a row (equations 7 and 8); by a rule that
  reads every step beta of its loss, see `train_lib.expected_loss`.
  """

  @dataclasses.dataclass(frozen=True)
  class Loss(expected_loss.Loss, TextClassification.Loss):
    """Legal fields of `loss`; `prior_rate` is that of PonderNet."""

    ponder_weight: Weight = 0.0

  KNOBS = ('ponder_weight',)
  MODEL: ClassVar[Any] = AlbertClassifier
  SIZES: ClassVar[sizes.Sizes] = sizes.ALBERT
  OPTIONS: ClassVar[Any] = Options

  @property
  def reads_every_step(self):
    """The loss of some rules does, such as PonderNet's."""
    return self.model.rule.EVERY_STEP

  def row_losses(self, logits, out, batch, entropy, frozen, knobs):
    """The cross-entropy, or PonderNet's loss; see the base."""
    if 'halting' not in out:
      return entropy(logits), {}
    return expected_loss.row_losses(self, out, entropy, batch['mask'], knobs)

  def extra_loss(self, out, batch, norm, knobs):
    """The ponder cost of the real rows; see `Classification.extra_loss`."""
    loss, metrics = ponder_loss(self, out['ponder'], batch, norm, knobs)
    return 0.0 if 'halting' in out else loss, metrics

  def cheaper(self):
    """Returns rules that halt earlier; see `Task.cheaper`."""
    return tuple({'rule': rule} for rule in self.model.rule.cheaper())

  def row_flops(self, out):
    """FLOPs of the mean iterations of a row's tokens; see the base."""
    return self.flops_of_steps(self.row_counts(out)['iterations'])

  def row_counts(self, out):
    """The mean iterations of a row's tokens, and the most of a token."""
    steps = out['ponder']['steps']
    mean = steps.sum(1, jnp.float32) / (steps > 0).sum(1, jnp.float32)
    return {'iterations': mean, 'depth': steps.max(1)}

  def serve_texts(self, given, reader, lengths, run, variables):
    """Halting with compaction; options: `albert_act.serving.Options`."""
    certified = given.setting, run, self.model, variables, VARIANT
    others, fields = certificate.serve(*certified)
    chain = AlbertChain(self.model, variables, reader, given.iterations, others)
    given = chain, chain.reader, self.label_names, lengths
    fields['several'] = self.MULTI_LABEL
    return chain, HaltingPolicy(*given, **fields)


def ponder_loss(task, ponder, batch, norm, knobs) -> tuple[Any, dict[str, Any]]:
  """Returns the weighted ponder loss (7) of `Encoded.ponder`, and metrics.

  `ponder_cost`: mean over rows of the sum over tokens; `iterations`: mean over
  real tokens; `depth`: mean over rows of the largest number.
  """
  mask = batch['mask']
  row_cost = ponder['cost'].sum(1)
  loss = task.adaptive_loss('ponder_weight', row_cost, mask, norm, knobs)
  steps = ponder['steps']
  real = (steps > 0) & (mask > 0)[:, None]
  metrics = {
    'ponder_cost': Average.from_values(row_cost, mask),
    'iterations': Average.from_values(steps, real.astype(jnp.float32)),
    'depth': Average.from_values(steps.max(1), mask),
  }
  return loss, metrics
