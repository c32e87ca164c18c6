"""A-ViT: a ViT whose tokens halt in depth (Yin et al. 2022, arXiv 2112.07658).

After block l a token with state x has the halting score `h^l = sigmoid(gamma *
x[0] + beta)`, without new parameters: checkpoints of a `ViT` load. ACT turns
scores into weights. A token that has halted is no key of later blocks. The
output is the sum of the states of [CLS], weighted by its scores (equation 9).

Losses: `alpha_p` times the mean of `rho = N + R`, and `alpha_d` times the KL
divergence of the scores over layers from a Gaussian. Constants follow the
authors' README and code (github.com/NVlabs/A-ViT): `gate_scale` 10 and
`gate_center` 30 (Ti; 75 for S), `ponder_token_scale` 5e-4, `distr_prior_alpha`
1e-3, a Gaussian at layer 9 of standard deviation 1, shares of at least 0.01.

Unlike in their code the divergence is that of an image, not of scores averaged
over the batch. The target sums to 1, theirs to 3.3, and the divergence is the
sum over layers, theirs the mean: at depth 12 their 1e-3 is 2.7e-4 here.
"""

import dataclasses
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from annotated_types import Interval
from jaxtyping import Array, Float

from adatape.task import PonderClassification
from halting import loop
from halting.rule import TokenRule
from halting.token_rules import ACT
from model_lib import blocks, flops, row_random
from model_lib.layers import LayerNorm, build
from model_lib.logical import constrain
from model_lib.row_random import RowKeys
from model_lib.tokens import compacted
from model_lib.vit import Encoder, ViT
from train_lib.terms import Term, Weight

MIN_SHARE = 0.01  # of a layer in the scores, as in the authors' code
LOG_ZERO = -1e30  # finite, for a gradient without NaN


class HaltingEncoder(Encoder):
  """An encoder whose tokens halt; fields as in `AViT`."""

  gamma: float = 10.0
  beta: float = -30.0
  rule: TokenRule = ACT()
  dynamic: bool = False

  @nn.compact
  def __call__(  # type: ignore[override]
    self, x: Float[Array, 'B L D'], row_keys: RowKeys = None
  ) -> tuple[Float[Array, 'B L D'], dict[str, Array]]:
    """Encodes tokens; returns (weighted sums of their states, ponder).

    Ponder has `[B]` 'steps' N and 'cost', of ACT N + R, float32, means over all
    tokens of a row, 'depth', the largest N, int32, and `[B, depth]`
    'log_scores', the logarithm of the summed scores of the running tokens.
    """
    pure = [blocks.pure(self.block(index), x) for index in range(self.depth)]
    # Dropout of a row must not depend on how many tokens other rows keep.
    saves = self.dynamic and row_keys is None

    def gate(x: Array) -> Array:
      return self.gamma * x[..., 0].astype(jnp.float32) + self.beta

    def step(x: Array, n: int, running: Array) -> tuple[Array, Array]:
      block, keys = pure[n], row_random.fold_rows(row_keys, f'block_{n}')
      x = compacted(block, x, running) if saves else block(x, running, keys)
      return x, jax.nn.sigmoid(gate(x))

    def log_scores(visit: loop.Visit) -> Array:
      # By logarithms: a ratio of scores of 1e-33 (S) has no finite gradient.
      logs = jax.nn.log_sigmoid(gate(visit.after))
      return jax.nn.logsumexp(jnp.where(visit.running, logs, LOG_ZERO), axis=1)

    result = loop.run(
      step,
      x,
      jnp.ones(x.shape[:2], bool),
      self.rule,
      max_steps=self.depth,
      unroll=True,
      trace=log_scores,
    )
    out = LayerNorm(name='norm', dtype=self.dtype)(result.output)
    state = result.halting
    ponder = {
      'steps': state.steps.astype(jnp.float32).mean(1),
      'cost': self.rule.cost(state).mean(1),
      'depth': state.steps.max(1),
      'log_scores': result.trace.T,
    }
    return constrain(out, 'batch', 'length', 'embed'), ponder


class AViT(ViT):
  """A ViT whose tokens halt in depth; `out['ponder']` of `HaltingEncoder`."""

  SHRINKS: ClassVar[bool] = False

  # The halting score is `sigmoid(gamma * x[..., 0] + beta)`.
  gamma: Annotated[float, Interval(ge=-1e4, le=1e4)] = 10.0
  beta: Annotated[float, Interval(ge=-1e4, le=1e4)] = -30.0
  rule: TokenRule = ACT()
  # Compute only running tokens (without `row_keys`), instead of masking.
  dynamic: bool = False

  def _encode(self, x: Any, row_keys: Any) -> tuple[Any, dict[str, Any]]:
    x, ponder = build(HaltingEncoder, self, name='encoder')(x, row_keys)
    return x, {'ponder': ponder}

  def flops(self, input_shape: flops.Shape, steps: flops.Mean = None) -> float:
    """Returns the FLOPs of one image; `steps` may be a mean of its tokens.

    The attention of a block is counted with all tokens as keys.
    """
    return self.image_flops(input_shape, self.depth if steps is None else steps)


def depth_prior(
  log_scores: Float[Array, 'B N'], depth: float | Float[Array, '']
) -> Float[Array, ' B']:
  """Returns `KL(target || scores / sum(scores))` of each row, in nats.

  The target is a Gaussian of standard deviation 1 at `depth`, from 1. Shares
  below `MIN_SHARE` count as that.
  """
  layers = jnp.arange(1, log_scores.shape[1] + 1, dtype=jnp.float32)[None]
  target = jax.nn.log_softmax(-0.5 * jnp.square(layers - depth))
  shares = jax.nn.log_softmax(log_scores)
  shares = jnp.maximum(shares, jnp.log(MIN_SHARE))
  return (jnp.exp(target) * (target - shares)).sum(1)


class AViTClassification(PonderClassification):
  """Adds the distribution prior to the ponder cost."""

  MODEL = AViT

  @dataclasses.dataclass(frozen=True)
  class Loss(PonderClassification.Loss):
    """Legal fields of `loss`."""

    ponder_weight: Weight = 5e-4  # alpha_p
    prior_weight: Weight = 2.7e-4  # alpha_d, see the module
    prior_depth: Annotated[float, Interval(ge=1.0, le=1e3)] = 9.0  # a layer

  KNOBS = ('ponder_weight', 'prior_weight', 'prior_depth')

  def row_flops(self, out):
    """FLOPs of the running tokens; see `Classification.row_flops`."""
    return self.flops_of_steps(out['ponder']['steps'])

  def terms(self, forward):
    """Returns also the prior."""
    depth = forward.settings['prior_depth']
    prior = depth_prior(forward.out['ponder']['log_scores'], depth)
    term = Term(prior, 'prior_weight', name='prior')
    return *super().terms(forward), term
