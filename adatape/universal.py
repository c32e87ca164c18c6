"""Transformers that halt in depth, by ACT: AdaTape's baselines (section 3.1).

The Universal Transformer (Dehghani et al. 2019) on symbols and on images; U2T,
with a block per step and a shared halting score, as in the authors' code; and
UViT, a ViT on top of a Universal Transformer.
"""

from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from annotated_types import Ge, Interval
from jaxtyping import Array, Bool, Float, Int, Num

from halting import loop
from halting.rule import TokenRule
from halting.token_rules import ACT
from model_lib import blocks, flops, layers, row_random
from model_lib.layers import EncoderBlock, build, masked_mean
from model_lib.logical import constrain, partitioned_dense
from model_lib.row_random import RowKeys
from model_lib.sizes import Rate, Size, check_heads
from model_lib.vit import Encoder, ImageModel, SymbolTokens, sincos1d

Steps = Annotated[int, Interval(ge=1, le=10_000)]


class Pondering(nn.Module, kw_only=True):
  """Fields of the encoders below and of their models."""

  mlp_dim: Annotated[int, Interval(ge=1, le=2**20)]
  num_heads: Annotated[int, Interval(ge=1, le=1024)]
  # A score per token, or its mean over the row (AdaTape, Algorithm 1).
  halting: Literal['token', 'example'] = 'token'
  # See `halting.loop.combine`.
  combination: Literal['accumulated', 'basic', 'fed_back'] = 'accumulated'
  rule: TokenRule = ACT()
  # Add the positions and the step number to the state before each step.
  coordinates: bool = True
  # Stop when every token of the batch has halted instead of masking all steps.
  dynamic: bool = False
  dropout: Rate = 0.0
  dtype: Any = jnp.float32


def add_coordinates(
  x: Float[Array, 'B L D'], step: Int[Array, ''] | int
) -> Float[Array, 'B L D']:
  """Adds sines of the positions and of the step (Dehghani et al., 2.1)."""
  length, width = x.shape[1:]
  places = sincos1d(jnp.arange(length, dtype=jnp.float32), width)
  time = sincos1d(jnp.asarray(step, jnp.float32)[None], width)
  return x + (places + time)[None].astype(x.dtype)


def score_layer() -> nn.Dense:
  """Returns the layer from a token to the logit of its halting score."""
  # A bias of 1 gives about two steps at initialisation (the authors' code).
  ones = nn.initializers.ones
  return partitioned_dense(1, 'embed', None, 'score', bias_init=ones)


def halting_score(
  logits: Float[Array, 'B L 1'], valid: Bool[Array, 'B L'], per: str
) -> Float[Array, '...']:
  """Returns scores `[B, L]` per 'token', or their means `[B]`."""
  score = jax.nn.sigmoid(logits)
  return (masked_mean(score, valid) if per == 'example' else score)[..., 0]


class UniversalStep(Pondering):
  """One step: adds the coordinates, then score and shared block."""

  @nn.compact
  def __call__(
    self,
    state: Float[Array, 'B L D'],
    step: Int[Array, ''],
    valid: Bool[Array, 'B L'],
    row_keys: RowKeys = None,
  ) -> tuple[Float[Array, 'B L D'], Float[Array, '...']]:
    """Returns (next state, score `[B, L]` or `[B]` in float32)."""
    x = add_coordinates(state, step) if self.coordinates else state
    score = halting_score(score_layer()(x), valid, self.halting)
    keys = row_random.fold_rows(row_keys, step)
    return build(EncoderBlock, self, name='block')(x, valid, keys), score


class UniversalEncoder(Pondering):
  """Applies `UniversalStep` until the tokens halt, then a norm."""

  max_steps: Steps
  final_norm: bool = True
  UNROLL: ClassVar[bool] = False  # see `halting.loop.run`

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'B L D'],
    mask: Bool[Array, 'B L'] | Num[Array, 'B L'] | None = None,
    row_keys: RowKeys = None,
  ) -> tuple[Float[Array, 'B L D'], dict[str, Array]]:
    """Returns (encoded tokens, ponder); tokens with mask 0 are ignored.

    Ponder has `[B]` 'steps' N and 'cost' N + R, float32, means over a row's
    valid tokens, and 'depth', the largest N, int32.
    """
    valid = jnp.ones(x.shape[:2], bool) if mask is None else mask.astype(bool)
    result = loop.run(
      self._step(x, valid, row_keys),
      x,
      valid if self.halting == 'token' else valid.any(axis=1),
      self.rule,
      max_steps=self.max_steps,
      combination=self.combination,
      dynamic=self.dynamic,
      unroll=self.UNROLL,
    )
    out = result.output
    if self.final_norm:
      out = layers.LayerNorm(name='norm', dtype=self.dtype)(out)
    steps = result.halting.steps.astype(jnp.float32)
    both = jnp.stack([steps, self.rule.cost(result.halting)], axis=-1)
    if self.halting == 'example':
      both = jnp.broadcast_to(both[:, None], (*valid.shape, 2))
    depth = jnp.where(valid, both[..., 0], 0.0).max(axis=1).astype(jnp.int32)
    both = masked_mean(both, valid)
    ponder = {'steps': both[:, 0], 'cost': both[:, 1], 'depth': depth}
    return constrain(out, 'batch', 'length', 'embed'), ponder

  def _step(self, x, valid, row_keys) -> loop.Step:
    step = build(UniversalStep, self, name='step')
    pure = blocks.pure(step, x, jnp.zeros((), jnp.int32), valid)
    return lambda x, n, _: pure(x, n, valid, row_keys)


class UnsharedEncoder(UniversalEncoder):
  """Applies `block_0`, `block_1`, ... until the tokens halt, then a norm.

  The steps are unrolled, because a scan has to stack the parameters of all
  blocks: its gradient needs 5 times the memory at B/32, batch 8.
  """

  UNROLL: ClassVar[bool] = True

  def _step(self, x, valid, row_keys) -> loop.Step:
    names = [f'block_{n}' for n in range(self.max_steps)]
    stack = [build(EncoderBlock, self, name=name) for name in names]
    score, *pure = [blocks.pure(m, x) for m in (score_layer(), *stack)]

    def step(state: Array, n: int, running: Array) -> Any:
      x = add_coordinates(state, n) if self.coordinates else state
      logits = score(x)
      new = pure[n](x, valid, row_random.fold_rows(row_keys, names[n]))
      return new, halting_score(logits, valid, self.halting)

    return step


class UniversalTransformer(Pondering):
  """A Universal Transformer on symbol sequences, for parity."""

  num_classes: int
  width: Annotated[int, Interval(ge=1, le=2**17)]  # even
  max_steps: Steps
  vocab_size: Annotated[int, Ge(1)] = 3

  def __post_init__(self):
    super().__post_init__()
    check_heads(self)

  @nn.compact
  def __call__(
    self,
    tokens: Int[Array, 'B N'],
    row_keys: RowKeys = None,
    mask: Bool[Array, 'B N'] | Num[Array, 'B N'] | None = None,
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies sequences, 0 in `mask` for padding, by their [CLS] token.

    `out['features']` is `[B, D]`; `out['ponder']`: see `UniversalEncoder`.
    """
    # Embeddings are initialised with the scale of the sines added to them.
    x = build(SymbolTokens, self, stddev=1.0, name='tokens')(tokens)
    if mask is not None:
      mask = jnp.pad(mask.astype(bool), ((0, 0), (1, 0)), constant_values=True)
    encoder = build(UniversalEncoder, self, name='encoder')
    x, ponder = encoder(x, mask, row_keys)
    logits, features = layers.pool_and_classify(x, 'cls', self.num_classes)
    return logits, {'features': features, 'ponder': ponder}

  def flops(self, input_shape: flops.Shape, steps: flops.Mean = None) -> float:
    """Returns the FLOPs of one sequence `[N]`; see `step_flops`."""
    steps = self.max_steps if steps is None else steps
    tokens = input_shape[0] + 1
    block = flops.block(tokens, self.width, self.mlp_dim)
    block += flops.dense(tokens, self.width, 1)
    return steps * block + flops.dense(1, self.width, self.num_classes)


def step_flops(
  model: ImageModel,
  input_shape: flops.Shape,
  steps: flops.Mean,
  most: int,
  others: int = 0,
) -> float:
  """Returns the FLOPs of an image `[H, W, E]` forward; see `model_lib.flops`.

  `steps` blocks, each with a score of every token, may be a measured mean of
  `depth`; None is `most`. `others` are blocks without a score.
  """
  count = most if steps is None else steps
  scores = flops.dense(model.image_tokens(input_shape), model.width, 1)
  return model.image_flops(input_shape, count + others) + count * scores


class UniversalViT(ImageModel, Pondering, kw_only=True):
  """A Universal Transformer on image patches; see `UniversalTransformer`."""

  max_steps: Steps
  ENCODER: ClassVar[type[UniversalEncoder]] = UniversalEncoder

  def _encode(self, x: Any, row_keys: Any) -> tuple[Any, dict[str, Any]]:
    encoder = build(self.ENCODER, self, name='encoder')
    x, ponder = encoder(x, None, row_keys)
    return x, {'ponder': ponder}

  def flops(self, input_shape: flops.Shape, steps: flops.Mean = None) -> float:
    """Returns the FLOPs of one image; see `step_flops`."""
    return step_flops(self, input_shape, steps, self.max_steps)


class UnsharedViT(UniversalViT, kw_only=True):
  """U2T: `UniversalViT` with a block per step, under the names of the ViT's.

  The paper's sizes are 13 (Ti, S) and 15 (B) blocks.
  """

  # The blocks differ, and a ViT's were trained without coordinates.
  coordinates: bool = False
  ENCODER: ClassVar[type[UniversalEncoder]] = UnsharedEncoder


class UViT(ImageModel, Pondering, kw_only=True):
  """A ViT on the output of a Universal Transformer, without a norm between."""

  depth: Size = None  # blocks of the ViT
  ut_steps: Steps = 3  # AdaTape: 3, with L 6

  def _encode(self, x: Any, row_keys: Any) -> tuple[Any, dict[str, Any]]:
    settings = {'max_steps': self.ut_steps, 'final_norm': False}
    universal = build(UniversalEncoder, self, name='universal', **settings)
    x, ponder = universal(x, None, row_keys)
    x = build(Encoder, self, name='encoder')(x, None, row_keys)
    return x, {'ponder': ponder}

  def flops(self, input_shape: flops.Shape, steps: flops.Mean = None) -> float:
    """Returns the FLOPs of one image; see `step_flops`."""
    return step_flops(self, input_shape, steps, self.ut_steps, self.depth)
