"""PonderNet on images: a shared block with a distribution over its steps.

Banino et al. 2021 with the block of a Universal Transformer. Training sees the
logits of every step, see `train_lib.expected_loss`. The prediction is that of
the median step (`halting.token_rules:PonderNet`).
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from adatape.task import PonderClassification
from adatape.universal import Steps, add_coordinates
from core.errors import ConfigError
from eval_lib.metrics import Average, row_statistics
from halting import costs, loop
from halting.rule import TokenRule
from halting.token_rules import PonderNet
from model_lib import blocks, flops, layers
from model_lib.layers import EncoderBlock, build, masked_mean
from model_lib.logical import constrain, partitioned_dense
from model_lib.row_random import RowKeys, fold_rows
from model_lib.sizes import Rate
from model_lib.vit import ImageModel, ImageTokens
from train_lib.expected_loss import ExpectedLoss
from train_lib.terms import Weight


class PonderStep(nn.Module):
  """One step: block, norm and pool, and lambda of the pooled tokens."""

  num_heads: int
  mlp_dim: int
  pool: str
  coordinates: bool
  dropout: float = 0.0
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self,
    state: dict[str, Array],
    step: Int[Array, ''],
    row_keys: RowKeys = None,
  ) -> tuple[dict[str, Array], Float[Array, ' B']]:
    """Returns ('tokens' `[B, L, D]` and 'features' `[B, D]`, lambda `[B]`)."""
    x = state['tokens']
    x = add_coordinates(x, step) if self.coordinates else x
    block = build(EncoderBlock, self, name='block')
    x = block(x, None, fold_rows(row_keys, step))
    normed = layers.LayerNorm(name='norm', dtype=self.dtype)(x)
    features = masked_mean(normed if self.pool == 'gap' else normed[:, :1])
    chance = partitioned_dense(1, 'embed', None, 'halt')(features)[:, 0]
    return {'tokens': x, 'features': features}, jax.nn.sigmoid(chance)


class PonderViT(ImageModel, kw_only=True):
  """A block applied up to `max_steps` times to image patches."""

  max_steps: Steps
  rule: TokenRule = PonderNet()  # one that reads every step
  # Add the positions and the step number to the state before each step.
  coordinates: bool = True
  # Stop when every row has reached its median step, in evaluation: the loss
  # reads all steps.
  dynamic: bool = False
  dropout: Rate = 0.0
  dtype: Any = jnp.float32

  def __post_init__(self):
    super().__post_init__()
    if not self.rule.EVERY_STEP:
      rule = type(self.rule).__name__
      raise ConfigError('rule', rule, 'a rule whose loss reads every step')

  @nn.compact
  def __call__(
    self, images: Float[Array, 'B H W E'], row_keys: RowKeys = None
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies images; (logits, out) come from the median step.

    `out['features']` are `[B, D]`; `out['ponder']` has, per row, the median
    step, as 'steps' float32 and 'depth' int32, and unless `dynamic` the mean
    step 'cost'. Then out also has of all steps the logits 'step_logits'
    `[N, B, O]` and the probabilities 'halting' `[N, B]`.
    """
    x = build(ImageTokens, self, name='tokens')(images)
    batch = x.shape[0]
    state = {'tokens': x, 'features': jnp.zeros((batch, self.width))}
    step = build(PonderStep, self, name='step')
    pure = blocks.pure(step, state, jnp.zeros((), jnp.int32))

    def trace(visit: loop.Visit) -> Any:
      return visit.evidence, visit.after['features']

    result = loop.run(
      lambda state, n, _: pure(state, n, row_keys),
      state,
      jnp.ones((batch,), bool),
      self.rule,
      max_steps=self.max_steps,
      dynamic=self.dynamic,
      trace=None if self.dynamic else trace,
    )
    head = layers.classifier(self.num_classes)
    features, depth = result.output['features'], result.halting.steps
    logits = constrain(head(features), 'batch', 'classes')
    ponder = {'steps': depth.astype(jnp.float32), 'depth': depth}
    out = {'features': features, 'ponder': ponder}
    if not self.dynamic:
      chances, every = result.trace
      out['halting'] = self.rule.distribution(chances)
      ponder['cost'] = costs.expected_steps(out['halting'])
      out['step_logits'] = head(every)
    return logits, out

  def flops(self, input_shape: flops.Shape, steps: flops.Mean = None) -> float:
    """Returns the FLOPs of one image with one head; None is `max_steps`."""
    steps = self.max_steps if steps is None else steps
    scores = steps * flops.dense(1, self.width, 1)
    return self.image_flops(input_shape, steps) + scores


class PonderNetClassification(ExpectedLoss):
  """The loss of PonderNet; a dynamic model has that of its predictions."""

  MODEL = PonderViT

  @dataclasses.dataclass(frozen=True)
  class Loss(ExpectedLoss.Loss):
    """Legal fields of `loss`."""

    ponder_weight: Weight = 0.01

  KNOBS = ('ponder_weight',)
  PANELS = PonderClassification.PANELS
  row_counts = PonderClassification.row_counts

  def row_flops(self, out):
    """FLOPs to the median step; see `Classification.row_flops`."""
    return self.flops_of_steps(out['ponder']['steps'])

  def metrics(self, forward):
    """Returns also the steps of rows."""
    ponder, mask = forward.out['ponder'], forward.masks['rows']
    metrics = super().metrics(forward)
    metrics |= row_statistics('ponder_steps', ponder['steps'], mask)
    if 'cost' in ponder:
      metrics['expected_steps'] = Average.from_values(ponder['cost'], mask)
    return metrics
