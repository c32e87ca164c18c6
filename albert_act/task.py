"""Fine-tuning of ALBERT with halting: cross-entropy and ponder cost.

The paper fine-tunes without the ponder cost; the published code uses it.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from albert_act.model import AlbertClassifier
from eval_lib.metrics import Average
from train_lib.expected_loss import ExpectedLoss
from train_lib.terms import Forward, Metrics, Term, Weight
from train_lib.text_classification import TextClassification

# The depth is drawn too: the last token of a row determines the row's time.
ITERATIONS = (
  'Iterations', 'iterations', 1.0,
  {'iterations': 'mean of the tokens', 'depth': 'depth of the rows'},
)  # fmt: skip


class FineTune(ExpectedLoss, TextClassification):
  """Classification or regression of texts by an `AlbertClassifier`.

  `loss.ponder_weight`, or a knob of that name, is tau of the ponder cost `sum_t
  N_t + R_t` over the real tokens of a row (equations 7 and 8); by a rule that
  reads every step beta of its loss, see `train_lib.expected_loss`.
  """

  @dataclasses.dataclass(frozen=True)
  class Loss(ExpectedLoss.Loss):
    """Legal fields of `loss`; `prior_rate` is that of PonderNet."""

    ponder_weight: Weight = 0.0

  KNOBS = ('ponder_weight',)
  MODEL: ClassVar[Any] = AlbertClassifier
  PANELS = (ITERATIONS,)
  SERVE = 'albert_act.chain:serve'

  def check_training(self):
    """The loss of some rules reads every step, such as PonderNet's."""
    if self.model.rule.EVERY_STEP:
      super().check_training()

  def terms(self, forward):
    """Adds the ponder cost to the terms of the base; PonderNet has a prior."""
    weight = 0.0 if 'halting' in forward.out else 'ponder_weight'
    return *super().terms(forward), ponder_cost(forward, weight)

  def metrics(self, forward):
    """Returns also iterations and depth; see `depths`."""
    return super().metrics(forward) | depths(forward)

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


def ponder_cost(forward: Forward, weight: Any, share: str = '') -> Term:
  """Returns tau times the ponder cost (7): a mean over rows of sums."""
  cost = forward.out['ponder']['cost'].sum(1)
  return Term(cost, weight, name='ponder_cost', share=share)


def depths(forward: Forward) -> Metrics:
  """Returns the mean of real tokens' iterations, and of the most of rows."""
  steps, rows = forward.out['ponder']['steps'], forward.masks['rows']
  real = ((steps > 0) & (rows > 0)[:, None]).astype(jnp.float32)
  return {
    'iterations': Average.from_values(steps, real),
    'depth': Average.from_values(steps.max(1), rows),
  }
