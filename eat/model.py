"""Encoders with token pruning, window attention and early exits: masked form.

EAT, sections 4 and 5 (Algorithm 1). Pruned tokens follow the kept ones and are
masked, so that the pruned share may be traced. `eat.chain` crops them.
`Adaptive` prunes and exits on any encoder that is a `BertClassifier`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from annotated_types import Interval, Predicate
from jaxtyping import Array, Float, Int

from eat.window_attention import window_attend, window_scores
from model_lib import flops, row_random
from model_lib import tokens as pruning
from model_lib.attention import KeysValues, attend
from model_lib.bert import BertClassifier
from model_lib.layers import classifier, valid_tokens
from model_lib.logical import partitioned_dense
from model_lib.modern_bert import ModernBertClassifier
from model_lib.row_random import RowKeys
from model_lib.tokens import Layers, Ratios, Tokens, check_layers, check_ratios

# `Adaptive` calls methods of an encoder, which is the next base of its classes.
if TYPE_CHECKING:
  Encoder = BertClassifier
else:
  Encoder = nn.Module


class Head(nn.Module):
  """A pooler and a classifier of a row; fields of `Adaptive`."""

  num_classes: int
  make_pooler: Callable[..., nn.Module]
  classifier_dropout: float = 0.0

  @nn.compact
  def __call__(
    self, cls: Float[Array, 'B D'], row_keys: RowKeys = None
  ) -> Float[Array, 'B O']:
    """Returns the logits of the rows, float32."""
    pooled = self.make_pooler(name='pooler')(cls).astype(jnp.float32)
    rate = self.classifier_dropout
    dropped = row_random.drop(pooled, rate, row_keys, 'classifier')
    return classifier(self.num_classes)(dropped)


class TokenScorer(nn.Module):
  """A learned score of every token, trained through a straight-through gate.

  Forward: the identity. Backward: as `x * (1 + sigmoid(score))`, but for [CLS].
  """

  @nn.compact
  def __call__(
    self, x: Float[Array, 'B S D']
  ) -> tuple[Float[Array, 'B S D'], Float[Array, 'B S']]:
    """Returns `x` with the gradient of the gates, and float32 scores."""
    score = partitioned_dense(1, 'embed', None, 'score')
    scores = score(x.astype(jnp.float32))[..., 0]
    gate = jax.nn.sigmoid(scores)
    gate = jnp.where(jnp.arange(x.shape[1])[None] > 0, gate, 0.0)
    factor = 1.0 + (gate - jax.lax.stop_gradient(gate))
    gated = (x.astype(jnp.float32) * factor[..., None]).astype(x.dtype)
    return gated, jax.lax.stop_gradient(scores)


class Encoded(NamedTuple):
  """The output of a run of blocks."""

  tokens: Tokens  # after the last block, pruned if the last block prunes
  cls: dict[int, Any]  # what the heads of the requested layers read, `[B, D]`
  kept: tuple[Any, ...]  # tokens left in each row `[B]` after each pruning
  full: Any  # states `[B, L, D]` at the original positions, or None


class Adaptive(Encoder, kw_only=True):
  """Token pruning and exits of an encoder that is the next base of a class.

  Layers are counted from 1: pruning "after layer 2" is before the third block.
  """

  prune_layers: Layers = (2, 4)  # layers after which tokens are pruned
  prune_ratios: Ratios = (0.3, 0.3)
  prune_scores: Literal['norm', 'attention', 'learned'] = 'norm'
  # Least tokens that pruning leaves in a row.
  min_tokens: Annotated[int, Interval(ge=1, le=2**20)] = 1
  merge: bool = False  # average a pruned token into the most similar kept one
  exit_layers: Layers = (4,)  # with a head; the last layer always has one
  # Exits read [CLS] plus the mean of the tokens that enter their block. In low
  # layers [CLS] knows little of them (not in the paper).
  exit_mean: bool = False
  # What the gradients of heads do to the layers below, see `branch`.
  gradient: Literal['joint', 'equilibrium', 'sweet'] = 'joint'
  # Also return all tokens at their original positions, for token-level tasks.
  restore: bool = False

  def __post_init__(self):
    super().__post_init__()
    check_layers('prune_layers', self.prune_layers, self.depth - 1)
    check_layers('exit_layers', self.exit_layers, self.depth)
    check_ratios(self.prune_ratios, self.prune_layers)

  @nn.nowrap
  def heads(self) -> tuple[int, ...]:
    """Returns the layers with a head, ascending; the last is `depth`."""
    return (*sorted({*self.exit_layers} - {self.depth}), self.depth)

  def setup(self):
    """Declares the modules under the encoder's names, and `exit_<layer>`."""
    super().setup()
    head: Any = functools.partial(Head, self.num_classes, self.pooler_kind())
    rate = self.classifier_dropout
    self.exit = {str(layer): head(rate) for layer in self.heads()[:-1]}
    if self.prune_scores == 'learned':
      self.scorer = {str(layer): TokenScorer() for layer in self.prune_layers}

  def __call__(
    self,
    tokens: Int[Array, 'B L'],
    token_types: Int[Array, 'B L'],
    length: Int[Array, ' B'],
    row_keys: RowKeys = None,
    prune_scale: Float[Array, ''] | float = 1.0,
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies rows of token ids, padded after `length`, with all heads.

    `row_keys` turn dropout on; `prune_scale` in [0, 1] multiplies
    `prune_ratios` and may be traced. Returns (logits of the last head, out):
    'exits' `[E, B, O]` of all `heads()`, 'kept' `[P, B]` tokens left after each
    pruning, 'positions' `[B, L]`, of which the first 'length' `[B]` are the
    kept tokens', 'features' `[B, D]` of the last head, and with `restore`
    'tokens' `[B, L, D]`.
    """
    *early, depth = heads = self.heads()
    start = self.embed(tokens, token_types, length, row_keys)
    options: Any = dict(heads=heads, row_keys=row_keys, prune_scale=prune_scale)
    encoded = self.run_blocks(start, 1, depth, **options)
    left, cls = encoded.tokens, encoded.cls
    exits = [self.head_logits(cls[n], n, row_keys) for n in early]
    logits, features = self.classify(cls[depth], row_keys)
    kept = jnp.asarray(encoded.kept, jnp.int32).reshape(-1, len(length))
    out = {'exits': jnp.stack([*exits, logits]), 'kept': kept}
    out |= {'positions': left.positions, 'length': left.length}
    if self.restore:
      out['tokens'] = pruning.restore(encoded.full, left)
    return logits, out | {'features': features}

  def embed(
    self,
    tokens: Int[Array, 'B L'],
    token_types: Int[Array, 'B L'],
    length: Int[Array, ' B'],
    row_keys: RowKeys = None,
  ) -> Tokens:
    """Embeds token ids, at their original positions."""
    x = self.embeddings(tokens, token_types, row_keys)
    return pruning.whole(x, length)

  def run_blocks(
    self,
    tokens: Tokens,
    first: int,
    last: int,
    *,
    heads: Sequence[int] = (),
    row_keys: RowKeys = None,
    prune_scale: Float[Array, ''] | float = 1.0,
    sizes: Sequence[Any] | None = None,
    keys_values: KeysValues | None = None,
  ) -> Encoded:
    """Runs the blocks `first` to `last`, with the pruning after each.

    `sizes` are static lengths after each of `prune_layers` (the gathered form);
    None keeps shapes (the masked form), `()` turns pruning off. `keys_values`
    are of block `first`, if `cls_after` has computed them.
    """
    cls, kept, full = {}, [], tokens.x if self.restore else None
    for layer in range(first, last + 1):
      keys = row_random.fold_rows(row_keys, f'block_{layer - 1}')
      prunes = layer in self.prune_layers and sizes != ()
      out = self.run_block(
        layer,
        tokens,
        keys,
        received=prunes and self.prune_scores == 'attention',
        keys_values=keys_values if layer == first else None,
      )
      below, tokens = tokens, tokens._replace(x=out.x)
      if layer in heads:
        states = out.x
        if row_keys is not None:  # in training
          later = len(heads) - 1 - list(heads).index(layer)
          states, x = branch(out.x, later, self.gradient)
          below = below._replace(x=branch(below.x, later, self.gradient)[0])
          tokens = tokens._replace(x=x)
        cls[layer] = self._read(states, below, layer)
      if prunes:
        if full is not None:
          full = pruning.restore(full, tokens)
        tokens = self._prune(tokens, layer, out.received, prune_scale, sizes)
        kept.append(tokens.length)
    return Encoded(tokens, cls, tuple(kept), full)

  def _prune(self, tokens, layer, received, prune_scale, sizes) -> Tokens:
    index = list(self.prune_layers).index(layer)
    ratio = jnp.asarray(self.prune_ratios[index], jnp.float32) * prune_scale
    if self.prune_scores == 'learned':
      x, scores = self.scorer[str(layer)](tokens.x)
      tokens = tokens._replace(x=x)
    elif self.prune_scores == 'attention':
      scores = received
    else:
      scores = pruning.norm_scores(tokens.x)
    size = tokens.x.shape[1] if sizes is None else sizes[index]
    return pruning.prune(
      tokens, scores, ratio, size, self.min_tokens, merge=self.merge
    )

  def cls_after(
    self, tokens: Tokens, layer: int
  ) -> tuple[Float[Array, 'B D'], KeysValues]:
    """Returns (what a block's head reads, keys and values of all tokens)."""
    out = self.run_block(layer, tokens, num_queries=1)
    return self._read(out.x, tokens, layer), out.keys_values

  def _read(self, x: Array, below: Tokens, layer: int) -> Array:
    """Returns what the head of a layer reads `[B, D]`; see `exit_mean`."""
    cls = self.pool(self.states(x), below.length)
    if not self.exit_mean or layer == self.depth:
      return cls
    valid = valid_tokens(below.x, below.length)[..., None]
    total = jnp.where(valid, self.states(below.x), 0.0).sum(1)
    return cls + total / below.length.clip(1)[:, None].astype(cls.dtype)

  def head_logits(
    self, cls: Float[Array, 'B D'], layer: int, row_keys: RowKeys = None
  ) -> Float[Array, 'B O']:
    """Returns the float32 logits of the head of a layer."""
    if layer == self.depth:
      return self.classify(cls, row_keys)[0]
    keys = row_random.fold_rows(row_keys, f'exit_{layer}')
    return self.exit[str(layer)](cls, keys)

  @nn.nowrap
  def flops(self, input_shape: tuple[int, ...]) -> float:
    """Returns the FLOPs of one row of `L` tokens, pruned, without exit."""
    length = input_shape[0]
    return sum(self.stage_flops(length, self.static_sizes(length)))

  @nn.nowrap
  def static_sizes(self, length: int) -> tuple[int, ...]:
    """Returns the static sequence lengths after each of `prune_layers`."""
    sizes = []
    for ratio in self.prune_ratios:
      length = pruning.static_size(length, float(ratio), self.min_tokens)
      sizes.append(length)
    return tuple(sizes)

  @nn.nowrap
  def stage_flops(
    self, length: int, sizes: Sequence[int], count_cls: bool = False
  ) -> list[float]:
    """Returns the FLOPs of one row in each stage, from one head to the next.

    `sizes` are the tokens after each pruning. `count_cls` counts as the chain
    computes: the other tokens of the block before a head in the next stage.
    Else, as in papers, every block counts before its head.
    """
    width = self.width
    head = flops.dense(1, width, width + self.num_classes)
    totals, total = [], 0.0
    for layer in range(1, self.depth + 1):
      block = self.block_flops(length, layer=layer)
      if layer not in self.heads():
        total += block
      elif count_cls and self.pooling == 'cls':
        alone = self.block_flops(length, only_cls=True, layer=layer)
        totals.append(total + alone + head)
        # [CLS] is computed again with the others; keys and values are not.
        total = block - flops.dense(length, width, 2 * width)
      else:
        totals.append(total + block + head)
        total = 0.0
      if sizes and layer in self.prune_layers:
        length = sizes[list(self.prune_layers).index(layer)]
    return totals


class EatClassifier(Adaptive, BertClassifier, kw_only=True):
  """BERT with token pruning, window attention and exits; see `Adaptive`."""

  # Width k of the attention window, k / 2 on each side.
  window: Annotated[
    int,
    Predicate(lambda k: k >= 0 and k % 2 == 0),
    'an even number, 0 for none',
  ] = 32
  window_implementation: Literal['auto', 'block', 'dense'] = 'auto'

  @nn.nowrap
  def make_blocks(self, count, attend=attend):
    """Returns blocks with window attention."""
    if self.window:
      kind: Any = dict(implementation=self.window_implementation)
      attend = functools.partial(window_attend, window=self.window, **kind)
    return super().make_blocks(count, attend)

  @nn.nowrap
  def block_flops(self, tokens, only_cls=False, layer=1):
    """See the base; counts the scores that are computed, also masked ones."""
    count = super().block_flops(tokens, only_cls, layer)
    if self.window and not only_cls:
      kind = self.window, self.window_implementation
      count += 4.0 * self.width * (window_scores(tokens, *kind) - tokens**2)
    return count


class EatModernBert(Adaptive, ModernBertClassifier, kw_only=True):
  """ModernBERT with token pruning and exits; all heads share the last norm."""


def branch(
  x: Float[Array, 'B L D'], later: int, gradient: str
) -> tuple[Float[Array, 'B L D'], Float[Array, 'B L D']]:
  """Returns the states for a head, and for the layers that follow.

  Both are equal to `x`, but pass back a share of their gradients: all of it if
  'joint'; with 'sweet' (Rotem et al. 2023) nothing from the `later` heads; with
  'equilibrium' (Li et al. 2019, section 3.1) 1 / (later + 1) from the head and
  the rest from the later ones, so that all heads weigh the same in every layer.
  """
  shares = {
    'joint': (1.0, 1.0),
    'sweet': (1.0, 0.0),
    'equilibrium': (1.0 / (later + 1), later / (later + 1)),
  }
  constant = jax.lax.stop_gradient(x)
  for_head, rest = (
    x if share == 1.0 else constant + share * (x - constant)
    for share in shares[gradient]
  )
  return for_head, rest
