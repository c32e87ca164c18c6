"""The loss of PonderNet (Banino et al. 2021, equation 2)."""

import dataclasses
from typing import Annotated, Any

import jax
from annotated_types import Interval

from core.errors import ConfigError
from halting import costs
from train_lib.classification import Classification
from train_lib.terms import Forward, Term


class ExpectedLoss(Classification):
  """Mixin: `sum_n p_n L_n + beta KL(p || prior)` instead of the last loss.

  A model that runs all steps has their logits `out['step_logits']` `[N, B, O]`
  and probabilities `out['halting']` `[N, B]`; other models keep the base's
  loss. beta is `loss.ponder_weight`.
  """

  @dataclasses.dataclass(frozen=True)
  class Loss(Classification.Loss):
    """Legal fields of `loss`, beside beta."""

    # lambda_p of the geometric prior; its mean is about 1 / prior_rate steps.
    prior_rate: Annotated[float, Interval(gt=0.0, lt=1.0)] = 0.2

  def terms(self, forward: Forward) -> tuple[Term, ...]:
    """Returns the expected loss, and the divergence, which is logged."""
    if 'halting' not in forward.out:
      return super().terms(forward)
    steps, logits = forward.out['halting'], forward.out['step_logits']
    losses: Any = jax.vmap(lambda each: self.target_loss(forward, each))(logits)
    rate = forward.settings['prior_rate']
    prior = costs.geometric_log_prior(rate, len(steps))
    distance = costs.divergence(steps, prior)
    divergence = Term(distance, 'ponder_weight', name='divergence')
    return Term((steps * losses).sum(0)), divergence

  def check_training(self) -> None:
    """Raises ConfigError for a model that leaves out steps of the loss."""
    if self.model.dynamic:
      expected = 'False in training, as the loss reads every step'
      raise ConfigError('model.dynamic', True, expected)
