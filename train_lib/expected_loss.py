"""The loss of PonderNet (Banino et al. 2021, equation 2).

A model that runs all steps returns the logits `out['step_logits']` `[N, B, O]`
and the probabilities `out['halting']` `[N, B]` of the steps.
"""

import dataclasses
from typing import Annotated, Any

import jax
from annotated_types import Interval
from jaxtyping import Array, Float

from eval_lib.metrics import Average
from halting import costs
from train_lib.classification import RowLoss


@dataclasses.dataclass(frozen=True)
class Loss:
  """Legal fields of `loss`, beside beta, `ponder_weight`."""

  # lambda_p of the geometric prior; its mean is about 1 / prior_rate steps.
  prior_rate: Annotated[float, Interval(gt=0.0, lt=1.0)] = 0.2


def row_losses(
  task: Any, out: Any, entropy: RowLoss, mask: Float[Array, ' B'], knobs: Any
) -> tuple[Float[Array, ' B'], dict[str, Any]]:
  """Returns `sum_n p_n L_n + beta KL(p || prior)` of each row, and metrics."""
  steps, rate = out['halting'], task.config['loss']['prior_rate']
  prior = costs.geometric_log_prior(rate, len(steps))
  distance = costs.divergence(steps, prior)
  rows = (steps * jax.vmap(entropy)(out['step_logits'])).sum(0)
  rows += task.loss_weight('ponder_weight', knobs) * distance
  return rows, {'divergence': Average.from_values(distance, mask)}
