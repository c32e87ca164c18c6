"""PonderNet on images: a shared block with a distribution over its steps.

Banino et al. 2021 with the block of a Universal Transformer. Training sees the
logits of every step. The prediction is that of the median step: the first at
which a row has halted with a probability of at least 1/2.

`lambda_n` is the probability to halt in step n if the item has not halted
before; `p_n = lambda_n prod_{j<n} (1 - lambda_j)`, with `lambda_N = 1` at the
step limit N. Arrays are float32 `[N, ...]`, as `ponder` stacks its trace.
"""

import dataclasses
import math
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from annotated_types import Interval
from jaxtyping import Array, Float, Int

from adatape.task import PonderClassification, flops_of_steps
from adatape.universal import Steps, add_coordinates
from eval_lib.metrics import Average, row_statistics
from model_lib import flops, pondering
from model_lib.halting import Halting
from model_lib.layers import (
  EncoderBlock,
  LayerNorm,
  build,
  classifier,
  masked_mean,
)
from model_lib.logical import constrain, partitioned_dense
from model_lib.row_random import RowKeys, fold_rows
from model_lib.sizes import Rate
from model_lib.vit import ImageModel, ImageTokens
from train_lib.classification import Classification
from train_lib.task import Weight


def halting_distribution(
  lambdas: Float[Array, 'N ...'],
) -> Float[Array, 'N ...']:
  """Returns `p_n` of each step (equation 1); the last lambda counts as 1."""
  lambdas = lambdas.astype(jnp.float32).at[-1].set(1.0)
  survived = jnp.cumprod(1.0 - lambdas, axis=0)
  before = jnp.concatenate([jnp.ones_like(survived[:1]), survived[:-1]])
  return lambdas * before


def geometric_log_prior(rate: float, max_steps: int) -> Float[Array, ' N']:
  """Returns the log of the geometric distribution truncated at `max_steps`.

  `rate` is lambda_p, in (0, 1); the mean is about 1 / rate.
  """
  steps = jnp.arange(max_steps, dtype=jnp.float32)
  return jax.nn.log_softmax(steps * math.log1p(-rate))


def divergence(
  distribution: Float[Array, 'N ...'], log_prior: Float[Array, ' N']
) -> Float[Array, '...']:
  """Returns `KL(p || prior)` in nats; a step of probability 0 adds 0."""
  shape = (-1,) + (1,) * (distribution.ndim - 1)
  positive = distribution > 0.0
  # Use where before log as well, or the gradient would be NaN.
  safe = jnp.where(positive, distribution, 1.0)
  ratio = jnp.log(safe) - log_prior.reshape(shape)
  return jnp.where(positive, distribution * ratio, 0.0).sum(0)


def expected_steps(distribution: Float[Array, 'N ...']) -> Float[Array, '...']:
  """Returns the mean number of steps, `sum_n n p_n`."""
  shape = (-1,) + (1,) * (distribution.ndim - 1)
  numbers = jnp.arange(1, distribution.shape[0] + 1, dtype=jnp.float32)
  return (distribution * numbers.reshape(shape)).sum(0)


def advance_median(
  halting: Halting, score: Float[Array, '...'], is_last: Array | bool
) -> tuple[Halting, Float[Array, '...']]:
  """Halts in the median step of the distribution: a `halting.Rule`.

  That is the first step where `sum_{j<=n} p_j >= 1/2`; `score` is lambda_n,
  `halting.total` the probability of having halted. The weight is 1 where an
  item halts.
  """
  halted = halting.total + (1.0 - halting.total) * score
  halts = halting.running & ((halted >= 0.5) | is_last)
  after = Halting(
    total=jnp.where(halting.running, halted, halting.total),
    remainder=halting.remainder,
    steps=halting.steps + halting.running.astype(jnp.int32),
    running=halting.running & ~halts,
  )
  return after, halts.astype(jnp.float32)


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
  ) -> dict[str, Array]:
    """Returns 'tokens' `[B, L, D]`, 'features' `[B, D]` and 'chance' `[B]`.

    Only the tokens of `state` are read.
    """
    x = state['tokens']
    x = add_coordinates(x, step) if self.coordinates else x
    block = build(EncoderBlock, self, name='block')
    x = block(x, None, fold_rows(row_keys, step))
    normed = LayerNorm(name='norm', dtype=self.dtype)(x)
    features = masked_mean(normed if self.pool == 'gap' else normed[:, :1])
    chance = partitioned_dense(1, 'embed', None, 'halt')(features)[:, 0]
    chance = jax.nn.sigmoid(chance)
    return {'tokens': x, 'features': features, 'chance': chance}


class PonderViT(ImageModel, kw_only=True):
  """A block applied up to `max_steps` times to image patches.

  The norm before the head is also that before the halting probability.
  """

  max_steps: Steps
  # Add the positions and the step number to the state before each step.
  coordinates: bool = True
  # Stop when every row has reached its median step (inference; no gradient)
  # instead of running all steps.
  dynamic: bool = False
  dropout: Rate = 0.0
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, images: Float[Array, 'B H W E'], row_keys: RowKeys = None
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies images; (logits, out) are those of the median step.

    `out['features']` are `[B, D]`; `out['ponder']` has, per row, 'steps', the
    median step, float32, and 'depth', the same as int32. Unless `dynamic`, it
    also has 'cost', the mean step, and out has the logits 'exits' `[N, B, O]`
    and the probabilities 'halting' `[N, B]` of all steps.
    """
    x = build(ImageTokens, self, name='tokens')(images)
    batch = x.shape[0]
    state = {
      'tokens': x,
      'features': jnp.zeros((batch, self.width)),
      'chance': jnp.zeros((batch,)),
    }
    step = build(PonderStep, self, name='step')
    if self.is_initializing():
      step(state, jnp.zeros((), jnp.int32))
    pure, variables = step.unbind()

    def pure_step(state: Any, n: Array) -> Any:
      state = pure.apply(variables, state, n, row_keys)
      return state, state['chance']

    def trace(before: Any, after: Any, halting: Any) -> Any:
      return after['chance'], after['features']

    result = pondering.ponder(
      pure_step,
      state,
      jnp.ones((batch,), bool),
      max_steps=self.max_steps,
      rule=advance_median,
      dynamic=self.dynamic,
      freeze=False,
      trace=None if self.dynamic else trace,
    )
    head = classifier(self.num_classes)
    features, depth = result.output['features'], result.halting.steps
    logits = constrain(head(features), 'batch', 'classes')
    ponder = {'steps': depth.astype(jnp.float32), 'depth': depth}
    out = {'features': features, 'ponder': ponder}
    if not self.dynamic:
      chances, every = result.trace
      halting = halting_distribution(chances)
      ponder['cost'] = expected_steps(halting)
      out |= {'exits': head(every), 'halting': halting}
    return logits, out

  def flops(
    self, input_shape: tuple[int, ...], steps: int | float | None = None
  ) -> float:
    """Returns the FLOPs of one image `[H, W, E]` with one head; see `flops`.

    `steps` may be a measured mean of `depth`; None is the most, `max_steps`.
    """
    steps = self.max_steps if steps is None else steps
    scores = steps * flops.dense(1, self.width, 1)
    return self.image_flops(input_shape, steps) + scores


class PonderNetClassification(Classification):
  """Expected cross-entropy of the steps + `ponder_weight` KL(p || prior)."""

  MODEL = PonderViT

  @dataclasses.dataclass(frozen=True)
  class Loss(Classification.Loss):
    """Legal fields of `loss`: beta and lambda_p (Banino et al., 2.3)."""

    ponder_weight: Weight = 0.01
    # Of the geometric prior; its mean is about 1 / prior_rate steps.
    prior_rate: Annotated[float, Interval(gt=0.0, lt=1.0)] = 0.2

  KNOBS = ('ponder_weight',)
  row_counts = PonderClassification.row_counts

  def row_flops(self, out):
    """FLOPs to the median step; see `Classification.row_flops`."""
    return flops_of_steps(self, out['ponder']['steps'])

  def row_losses(self, logits, out, batch, entropy, frozen, knobs):
    """Returns `sum_n p_n L_n + beta KL(p || prior)` of each row (equation 2).

    A dynamic model, for evaluation only, has the loss of its predictions.
    """
    ponder, mask = out['ponder'], batch['mask']
    metrics = row_statistics('ponder_steps', ponder['steps'], mask)
    if self.model.dynamic:
      return entropy(logits), metrics
    rate, halting = self.config['loss']['prior_rate'], out['halting']
    prior = geometric_log_prior(rate, len(halting))
    beta = self.loss_weight('ponder_weight', knobs)
    losses = jax.vmap(entropy)(out['exits'])
    distance = divergence(halting, prior)
    metrics['expected_steps'] = Average.from_values(ponder['cost'], mask)
    metrics['divergence'] = Average.from_values(distance, mask)
    return (halting * losses).sum(0) + beta * distance, metrics
