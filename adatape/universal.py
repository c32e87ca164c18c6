"""The Universal Transformer with ACT: one block, applied until tokens halt.

Dehghani et al. 2019. Each step adds the positions and the step number to the
state as sines and cosines, computes the halting score from the result and
applies the shared block. `out['ponder']` has the steps and cost of each row.
"""

from typing import Annotated, Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from annotated_types import Ge, Interval
from jaxtyping import Array, Bool, Float, Int, Key, Num

from model_lib import flops, halting, pondering, row_random
from model_lib.layers import (
  EncoderBlock,
  LayerNorm,
  build,
  masked_mean,
  pool_and_classify,
)
from model_lib.logical import constrain, partitioned_dense
from model_lib.sizes import Rate, check_heads
from model_lib.vit import ImageTokens, SymbolTokens, sincos1d


class Pondering(nn.Module, kw_only=True):
  """Fields of the models below and of their layers."""

  max_steps: Annotated[int, Interval(ge=1, le=10_000)]
  mlp_dim: Annotated[int, Interval(ge=1, le=2**20)]
  num_heads: Annotated[int, Interval(ge=1, le=1024)]
  # A score per token, or its mean over the row (AdaTape, Algorithm 1).
  halting: Literal['token', 'example'] = 'token'
  # See `model_lib.halting.combine`.
  combination: Literal['accumulated', 'basic', 'fed_back'] = 'accumulated'
  # A token halts when its scores sum to `1 - epsilon`.
  epsilon: Annotated[float, Interval(ge=0.0, lt=1.0)] = 0.01
  # Stop when every token of the batch has halted (inference; no gradient)
  # instead of masking `max_steps` steps.
  dynamic: bool = False
  dropout: Rate = 0.0
  dtype: Any = jnp.float32


class UniversalStep(Pondering):
  """One step: adds positions and time, then score and shared block."""

  @nn.compact
  def __call__(
    self,
    state: Float[Array, 'B L D'],
    step: Int[Array, ''],
    valid: Bool[Array, 'B L'],
    row_keys: Key[Array, ' B'] | None = None,
  ) -> tuple[Float[Array, 'B L D'], Float[Array, '...']]:
    """Returns (next state, score `[B, L]` or `[B]` in float32)."""
    length, width = state.shape[1:]
    places = sincos1d(jnp.arange(length, dtype=jnp.float32), width)
    time = sincos1d(step.astype(jnp.float32)[None], width)
    x = state + (places + time)[None].astype(state.dtype)
    # A bias of 1 gives about two steps at initialisation (the authors' code).
    ones = nn.initializers.ones
    score = partitioned_dense(1, 'embed', None, 'score', bias_init=ones)(x)
    score = jax.nn.sigmoid(score)
    score = masked_mean(score, valid) if self.halting == 'example' else score
    keys = row_random.fold_rows(row_keys, step)
    x = build(EncoderBlock, self, name='block')(x, valid, keys)
    return x, score[..., 0]


class UniversalEncoder(Pondering):
  """Applies `UniversalStep` until the tokens halt, then a norm."""

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'B L D'],
    mask: Bool[Array, 'B L'] | Num[Array, 'B L'] | None = None,
    row_keys: Key[Array, ' B'] | None = None,
  ) -> tuple[Float[Array, 'B L D'], dict[str, Array]]:
    """Encodes tokens; those with mask 0 are ignored.

    Returns (tokens, ponder) with `[B]` 'steps' N and 'cost' N + R, both means
    over a row's valid tokens, float32, and 'depth', the largest N, int32.
    """
    valid = jnp.ones(x.shape[:2], bool) if mask is None else mask.astype(bool)
    step = build(UniversalStep, self, name='step')
    if self.is_initializing():
      step(x, jnp.zeros((), jnp.int32), valid)
    # Linen modules must not be called in a plain JAX loop.
    pure, variables = step.unbind()

    def pure_step(state: Array, n: Array) -> Any:
      return pure.apply(variables, state, n, valid, row_keys)

    result = pondering.ponder(
      pure_step,
      x,
      valid if self.halting == 'token' else valid.any(axis=1),
      max_steps=self.max_steps,
      rule=halting.rule('act', self.epsilon),
      combination=self.combination,
      dynamic=self.dynamic,
    )
    out = LayerNorm(name='norm', dtype=self.dtype)(result.output)
    steps = result.halting.steps.astype(jnp.float32)
    cost = halting.ponder_cost(result.halting)
    if self.halting == 'example':
      steps, cost = (
        jnp.broadcast_to(value[:, None], valid.shape) for value in (steps, cost)
      )
    both = masked_mean(jnp.stack([steps, cost], axis=-1), valid)
    depth = jnp.where(valid, steps, 0.0).max(axis=1).astype(jnp.int32)
    ponder = {'steps': both[:, 0], 'cost': both[:, 1], 'depth': depth}
    return constrain(out, 'batch', 'length', 'embed'), ponder


class UniversalModel(Pondering, kw_only=True):
  """Base of the models below."""

  num_classes: int
  width: Annotated[int, Interval(ge=1, le=2**17)]  # even

  def __post_init__(self):
    super().__post_init__()
    check_heads(self)

  def _classify(self, x, mask, row_keys, pool):
    encoder = build(UniversalEncoder, self, name='encoder')
    x, ponder = encoder(x, mask, row_keys)
    logits, features = pool_and_classify(x, pool, self.num_classes)
    return logits, {'features': features, 'ponder': ponder}

  def _encoder_flops(self, tokens: int) -> float:
    step = flops.block(tokens, self.width, self.mlp_dim)
    step += flops.dense(tokens, self.width, 1)
    head = flops.dense(1, self.width, self.num_classes)
    return self.max_steps * step + head


class UniversalTransformer(UniversalModel):
  """A Universal Transformer on symbol sequences, for parity."""

  vocab_size: Annotated[int, Ge(1)] = 3

  @nn.compact
  def __call__(
    self,
    tokens: Int[Array, 'B N'],
    row_keys: Key[Array, ' B'] | None = None,
    mask: Bool[Array, 'B N'] | Num[Array, 'B N'] | None = None,
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies sequences, 0 in `mask` for padding, by their [CLS] token.

    Returns (logits, out) with `out['features']` `[B, D]` and `out['ponder']`,
    see `UniversalEncoder`; [CLS] counts as a token.
    """
    # Embeddings are initialised with the scale of the sines added to them.
    x = build(SymbolTokens, self, stddev=1.0, name='tokens')(tokens)
    if mask is not None:
      mask = jnp.pad(mask.astype(bool), ((0, 0), (1, 0)), constant_values=True)
    return self._classify(x, mask, row_keys, 'cls')

  def flops(self, input_shape: tuple[int, ...]) -> float:
    """Returns the FLOPs of one sequence `[N]` for all `max_steps` steps."""
    return self._encoder_flops(input_shape[0] + 1)


class UniversalViT(UniversalModel):
  """A Universal Transformer on image patches."""

  patch_size: Annotated[int, Interval(ge=1, le=4096)] = 16
  pool: Literal['cls', 'gap'] = 'cls'

  @nn.compact
  def __call__(
    self,
    images: Float[Array, 'B H W E'],
    row_keys: Key[Array, ' B'] | None = None,
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies images; the result is that of `UniversalTransformer`."""
    x = build(ImageTokens, self, name='tokens')(images)
    return self._classify(x, None, row_keys, self.pool)

  def flops(self, input_shape: tuple[int, ...]) -> float:
    """Returns the FLOPs of one image `[H, W, E]` for all `max_steps` steps."""
    tokens = flops.num_patches(input_shape, self.patch_size)
    tokens += self.pool == 'cls'
    embed = flops.patch_embed(input_shape, self.patch_size, self.width)
    return embed + self._encoder_flops(tokens)
