"""Fine-tuning with exits: joint loss, distillation, annealed pruning.

EAT, equations (1)-(3): `sum_l lambda_l CE(P_l, y) + mu T^2 KL(P_teacher^T ||
P_L^T)`. The same task trains dense models and distilled students of one head.
"""

import dataclasses
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval, MinLen
from jaxtyping import Array, Float

from core.errors import ConfigError
from eval_lib.metrics import Average
from train_lib.distillation import Student, Teacher
from train_lib.task import construct
from train_lib.terms import Forward, Metrics, Term, Weight
from train_lib.text_classification import TextClassification

EXIT_WEIGHT, LAST_WEIGHT = 0.3, 1.0  # EAT, equation (1)
SCALES = (1.25, 1.5, 2.0)  # of the prune ratios, for a certificate


class FineTune(Student, TextClassification):
  """Cross-entropy of all heads, and two distillations.

  The knob `prune_scale` multiplies the model's prune ratios while training,
  `exit_scale` the weights of all heads but the last: ('alternate', 0, 1) trains
  the last head alone in every other step (BERxiT, Xin et al. 2021).
  """

  @dataclasses.dataclass(frozen=True)
  class Loss(TextClassification.Loss):
    """Legal fields of `loss`; default weights: 0.3 per exit, 1 for the last."""

    exit_weights: Annotated[tuple[Weight, ...], MinLen(1)] | None = None
    temperature: Annotated[float, Interval(ge=0.01, le=100.0)] = 2.0
    teacher: Teacher = ''
    distill_weight: Weight = 0.5  # distillation from teacher to last head
    self_distill_weight: Weight = 0.0  # from later heads to each exit
    # The last head, or all later ones, which then count the same.
    self_distill_from: Literal['last', 'later'] = 'last'

  MODEL_KNOBS = ('prune_scale',)
  SERVE = 'eat.chain:serve'
  KNOBS = 'prune_scale', 'exit_scale', 'distill_weight', 'self_distill_weight'

  @classmethod
  def validate_config(cls, config) -> None:
    """Also checks that there is a weight for each head."""
    super().validate_config(config)
    heads = len(construct(config, num_classes=2).heads())
    weights = config['loss']['exit_weights']
    if weights is None:
      weights = (*(EXIT_WEIGHT,) * (heads - 1), LAST_WEIGHT)
      config['loss']['exit_weights'] = weights
    if len(weights) != heads:
      expected = f'{heads} weights, one for each head of the model'
      raise ConfigError('loss.exit_weights', weights, expected)

  def cheaper(self):
    """Returns larger prune ratios; see `Task.cheaper`."""
    ratios = self.model.prune_ratios if is_adaptive(self.model) else ()
    scaled = [tuple(round(s * r, 4) for r in ratios) for s in SCALES]
    legal = [one for one in scaled if any(one) and max(one) < 1]
    return tuple({'prune_ratios': one} for one in legal)

  def outputs(self, params, model_state, batch):
    """Also returns 'flops' `[B, E]`, of rows that leave at each head."""
    result = super().outputs(params, model_state, batch)
    if is_adaptive(model := self.model):
      costs = [
        np.cumsum(model.stage_flops(n, model.static_sizes(n), True))
        for n in range(1, batch['tokens'].shape[1] + 1)
      ]
      result['flops'] = jnp.asarray(costs, jnp.float32)[batch['length'] - 1]
    return result

  @property
  def head_layers(self) -> tuple[int, ...]:
    """The layer of each head; see `Task.head_layers`."""
    return self.model.heads()

  def terms(self, forward):
    """Returns the loss of each head, and distillations; see the module."""
    exits, settings = exits_of(forward), forward.settings
    scale = settings.get('exit_scale', 1.0)
    *early, last = settings['exit_weights']
    weights = [*(weight * scale for weight in early), last]
    terms = [
      Term(self.target_loss(forward, logits), weight)
      for logits, weight in zip(exits, weights, strict=True)
    ]
    if forward.frozen:
      target = self.teacher_logits(forward.frozen, forward.batch)
      distance = self.divergence(target, exits[-1])
      terms.append(Term(distance, 'distill_weight'))
    if early:
      weight = settings['self_distill_weight'] * scale
      terms.append(Term(self._self_distillation(exits), weight))
    return tuple(terms)

  def _self_distillation(self, exits: Float[Array, 'E B O']) -> Array:
    """Returns the divergences `[B]` of exits from later heads, summed."""
    targets, rows = jax.lax.stop_gradient(exits), jnp.zeros(exits.shape[1])
    divergences = jax.vmap(self.divergence, (0, None))
    for place, one in enumerate(exits[:-1], 1):
      from_last = self.config['loss']['self_distill_from'] == 'last'
      later = targets[-1:] if from_last else targets[place:]
      rows += divergences(later, one).mean(0)
    return rows

  def metrics(self, forward):
    """Returns also the accuracy of each exit, and `retention`."""
    batch, metrics = forward.batch, super().metrics(forward)
    early = zip(self.head_layers[:-1], exits_of(forward)[:-1], strict=True)
    for layer, logits in () if self.is_regression else early:
      correct = self.correct(logits.argmax(-1), batch)
      right = Average.from_values(correct, batch['mask'])
      metrics[f'accuracy_exit_{layer}'] = right
    return metrics | retention(forward)


def exits_of(forward: Forward) -> Float[Array, 'E B O']:
  """Returns the logits of all heads; of a dense model of the last one."""
  return forward.out.get('exits', forward.logits[None])


def retention(forward: Forward) -> Metrics:
  """Returns the mean share of tokens kept by all prunings, if there are any."""
  kept, batch = forward.out.get('kept', ()), forward.batch
  if not len(kept):
    return {}
  share = kept[-1] / batch['length'].astype(jnp.float32)
  return {'retention': Average.from_values(share, batch['mask'])}


def is_adaptive(model: Any) -> bool:
  """Returns False for a dense encoder."""
  from eat.model import Adaptive

  return isinstance(model, Adaptive)
