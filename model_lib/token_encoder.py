"""Encoders of a ViT: all tokens, or fewer in later blocks.

Both have the same parameters; all rows as many tokens, so shapes are static.
"""

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from core.errors import ConfigError
from model_lib import blocks, layers, row_random
from model_lib import tokens as pruning
from model_lib.attention import attend, split_heads
from model_lib.layers import EncoderBlock, Mask, build
from model_lib.row_random import RowKeys

RECEIVED: dict[str, Any] = {'attention': True, 'cls': 'cls', 'norm': False}


class Encoder(nn.Module):
  """A stack of encoder blocks and the norm after them; fields as in `ViT`."""

  depth: int
  num_heads: int
  mlp_dim: int
  dropout: float = 0.0
  activation: str = 'gelu'
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x: Float[Array, 'B L D'], mask: Mask = None, row_keys: RowKeys = None
  ) -> Float[Array, 'B L D']:
    """Encodes the tokens; keys with mask 0 are never read."""
    numbers = range(self.depth)
    stack = [self.block(index) for index in numbers]
    keys = [row_random.fold_rows(row_keys, f'block_{n}') for n in numbers]
    x = blocks.apply(stack, x, mask, keys)
    return layers.LayerNorm(name='norm', dtype=self.dtype)(x)

  def block(self, index: int) -> EncoderBlock:
    """Returns a new block; a subclass may build another kind."""
    return build(EncoderBlock, self, name=f'block_{index}')


class TokenBlock(EncoderBlock):
  """An `EncoderBlock` of `Tokens`."""

  @nn.compact
  def __call__(  # type: ignore[override]
    self,
    tokens: pruning.Tokens,
    row_keys: RowKeys = None,
    masked: bool = False,
    received: Any = False,
    merge: int = 0,
    first: int = 1,
  ) -> tuple[pruning.Tokens, Float[Array, 'B L'] | None]:
    """Returns the tokens and, if `received`, the attention they received.

    Between attention and feed-forward network `merge` tokens are merged by the
    mean of their keys over the heads (ToMe). `masked`: not all are valid.
    """
    mask = layers.valid_tokens(tokens.x, tokens.length) if masked else None
    proportional = functools.partial(attend, sizes=tokens.sizes)
    x, attended = self.attended(
      tokens.x, mask, row_keys, proportional, received=received
    )
    tokens = tokens._replace(x=x)
    if merge:
      keys: Any = split_heads(attended.keys_values[0], self.num_heads)
      tokens = pruning.merge_pairs(tokens, keys.mean(1), merge, first)
    return tokens._replace(x=self.fed(tokens.x, row_keys)), attended.received


class TokenEncoder(Encoder):
  """Blocks with pruning and merging, and a norm; fields as in `ViT`."""

  pool: str = 'cls'
  prune_layers: Sequence[int] = ()
  prune_ratios: Sequence[float] = ()
  prune_scores: str = 'attention'
  prune_masked: bool = False
  merge_layers: Sequence[int] = ()
  merge_count: int = 0

  @nn.compact
  def __call__(  # type: ignore[override]
    self, x: Float[Array, 'B L D'], row_keys: RowKeys = None
  ) -> tuple[Float[Array, 'B K D'], pruning.Tokens]:
    """Encodes tokens; returns (what is pooled, all that are left).

    With the pool 'gap' the first is the mean `[B, 1, D]` of those left.
    """
    first = int(self.pool == 'cls')
    tokens = pruning.whole(x, jnp.full(x.shape[:1], x.shape[1], jnp.int32))
    ratios = dict(zip(self.prune_layers, self.prune_ratios, strict=True))
    for layer in range(1, self.depth + 1):
      name = f'block_{layer - 1}'
      tokens, received = blocks.call(
        build(TokenBlock, self, name=name),
        tokens,
        row_random.fold_rows(row_keys, name),
        masked=self.prune_masked and any(n < layer for n in ratios),
        received=layer in ratios and RECEIVED[self.prune_scores],
        merge=self.merge_count if layer in self.merge_layers else 0,
        first=first,
      )
      if layer in ratios:
        scores = pruning.norm_scores(tokens.x) if received is None else received
        count = size = tokens.x.shape[1]
        if not self.prune_masked:
          size = pruning.static_size(count, ratios[layer], first=first)
        tokens = pruning.prune(tokens, scores, ratios[layer], size, first=first)
    x = layers.LayerNorm(name='norm', dtype=self.dtype)(tokens.x)
    tokens = tokens._replace(x=x)
    return (x if first else self._mean(tokens)), tokens

  def _mean(self, tokens: pruning.Tokens) -> Float[Array, 'B 1 D']:
    if tokens.sizes is None:
      valid = layers.valid_tokens(tokens.x, tokens.length)
      return layers.masked_mean(tokens.x, valid)[:, None]
    share = tokens.sizes / tokens.sizes.sum(1, keepdims=True)
    x = tokens.x.astype(jnp.float32)
    return (x * share[..., None]).sum(1, keepdims=True)


def check(model: Any) -> None:
  """Raises ConfigError unless the fields of a `ViT` fit each other."""
  pruning.check_layers('prune_layers', model.prune_layers, model.depth - 1)
  pruning.check_layers('merge_layers', model.merge_layers, model.depth)
  pruning.check_ratios(model.prune_ratios, model.prune_layers)
  if set(model.prune_layers) & {*model.merge_layers}:
    expected = f'none of prune_layers={tuple(model.prune_layers)}'
    raise ConfigError('merge_layers', tuple(model.merge_layers), expected)
  if bool(model.merge_layers) != bool(model.merge_count):
    expected = '>= 1 with merge_layers, else 0'
    raise ConfigError('merge_count', model.merge_count, expected)
  if model.prune_masked and model.merge_layers:
    raise ConfigError('prune_masked', True, 'False with merge_layers')
  if model.prune_scores == 'cls' and model.pool != 'cls':
    raise ConfigError('prune_scores', 'cls', f'another with pool={model.pool}')


def counts(model: Any, tokens: int) -> list[tuple[int, int]]:
  """Returns tokens in the attention and in the network of each block."""
  first, pairs = int(model.pool == 'cls'), []
  ratios = dict(zip(model.prune_layers, model.prune_ratios, strict=True))
  for layer in range(1, model.depth + 1):
    before = tokens
    if layer in model.merge_layers:
      tokens -= pruning.merged_count(tokens, model.merge_count, first)
    pairs.append((before, tokens))
    if layer in ratios:
      tokens = pruning.static_size(tokens, float(ratios[layer]), first=first)
  return pairs
