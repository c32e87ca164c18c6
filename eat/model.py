"""BERT with token pruning, window attention and early exits: the masked form.

EAT, sections 4 and 5 (Algorithm 1). Shapes never change here: pruned tokens
stay behind the kept ones and are masked, so that the share that is pruned may
be a traced number. `eat.serving` crops them away; both run `encode` below.
Without pruning, window and exits this is BERT, the same graph.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from eat import cost, pruning
from eat.heads import Head, check_layers
from eat.pruning import Tokens
from eat.window_attention import IMPLEMENTATIONS, window_attend
from model_lib import row_random
from model_lib.attention import KeysValues, attend
from model_lib.bert import blocks_of, embeddings_of
from model_lib.bert_sizes import BertSizes, resolve_sizes
from model_lib.layers import Pooler, classifier

SCORES = ('norm', 'attention', 'learned')


class Encoded(NamedTuple):
  """What a run of blocks gives.

  Attributes:
    tokens: the tokens after the last block, pruned if it prunes.
    cls: `[B, D]` of [CLS] after each block that was asked for, by layer.
    kept: tokens left in each row after each pruning, `[B]` each.
    full: `[B, L, D]` states at the original places, or None.
  """

  tokens: Tokens
  cls: dict[int, Any]
  kept: tuple[Any, ...]
  full: Any


class EatClassifier(nn.Module):
  """BERT that prunes tokens, attends in windows and has heads to exit at.

  Layers are counted from 1, as in the paper: pruning "after layer 2" happens
  between the second block and the third.

  Attributes:
    num_classes: width of the logits; 1 for regression.
    variant: sizes by name, see `bert_sizes.VARIANTS`; the next four
      override it unless 0.
    width: width of the tokens.
    depth: number of blocks.
    mlp_dim: hidden width of the feed-forward networks.
    num_heads: attention heads.
    vocab_size: number of token ids.
    max_positions: longest sequence.
    type_vocab_size: number of token types, 0 for none (DistilBERT).
    activation: of the feed-forward networks.
    norm_epsilon: of every LayerNorm.
    pooler_activation: 'tanh' (BERT) or 'relu' (DistilBERT).
    dropout: rate on embeddings and after both halves of a block.
    attention_dropout: rate on the attention weights.
    classifier_dropout: rate before every classifier.
    prune_layers: layers after which tokens are pruned.
    prune_ratios: share of the tokens that goes after each of them.
    prune_scores: what ranks the tokens: 'norm', 'attention' or 'learned'.
    min_tokens: no row is pruned below so many tokens.
    merge: average a pruned token into the most similar kept one.
    window: width k of the attention window (k / 2 to each side), 0 for none.
    window_implementation: 'auto', 'block' or 'dense'; same numbers.
    exit_layers: layers with a head of their own; the last has one anyway.
    restore: also return the states of all tokens at their original places,
      for token-level tasks.
    dtype: compute dtype; parameters and logits are float32.
  """

  num_classes: int
  variant: str = ''
  width: int = 0
  depth: int = 0
  mlp_dim: int = 0
  num_heads: int = 0
  vocab_size: int = 30522
  max_positions: int = 512
  type_vocab_size: int = 2
  activation: str = 'gelu'
  norm_epsilon: float = 1e-12
  pooler_activation: str = 'tanh'
  dropout: float = 0.1
  attention_dropout: float = 0.1
  classifier_dropout: float = 0.1
  prune_layers: Sequence[int] = (2, 4)
  prune_ratios: Sequence[float] = (0.3, 0.3)
  prune_scores: str = 'norm'
  min_tokens: int = 1
  merge: bool = False
  window: int = 32
  window_implementation: str = 'auto'
  exit_layers: Sequence[int] = (4,)
  restore: bool = False
  dtype: Any = jnp.float32

  def sizes(self) -> BertSizes:
    """The encoder's sizes, and a check of all fields about layers.

    Raises:
      ValueError: naming the field, what is legal and what is given.
    """
    sizes = resolve_sizes(
      self.variant,
      width=self.width,
      depth=self.depth,
      mlp_dim=self.mlp_dim,
      num_heads=self.num_heads,
    )
    check_layers('prune_layers', self.prune_layers, sizes.depth - 1)
    check_layers('exit_layers', self.exit_layers, sizes.depth)
    if len(self.prune_ratios) != len(self.prune_layers) or not all(
      0.0 <= ratio < 1.0 for ratio in self.prune_ratios
    ):
      raise ValueError(
        'prune_ratios: expected a share in [0, 1) for each of prune_layers='
        f'{tuple(self.prune_layers)}, got {tuple(self.prune_ratios)}'
      )
    if self.prune_scores not in SCORES:
      raise ValueError(
        f'prune_scores: expected one of {SCORES}, got {self.prune_scores!r}'
      )
    if self.min_tokens < 1:
      raise ValueError(
        'min_tokens: expected at least 1, as [CLS] always stays, got '
        f'{self.min_tokens}'
      )
    if self.window < 0 or self.window % 2:
      raise ValueError(
        f'window: expected an even number, 0 for none, got {self.window}'
      )
    if self.window_implementation not in IMPLEMENTATIONS:
      raise ValueError(
        f'window_implementation: expected one of {IMPLEMENTATIONS}, got '
        f'{self.window_implementation!r}'
      )
    return sizes

  def heads(self) -> tuple[int, ...]:
    """The layers with a head, ascending; the last one is the model's."""
    depth = self.sizes().depth
    return (*sorted({*self.exit_layers} - {depth}), depth)

  def setup(self):
    """Declares the modules under BERT's names, and `exit_<layer>`."""
    self.embeddings = embeddings_of(self)
    self.block = blocks_of(self, self._attend())
    self.exit = {str(layer): self._head() for layer in self.heads()[:-1]}
    self.pooler = Pooler(self.pooler_activation, dtype=self.dtype)
    self.head = classifier(self.num_classes)
    if self.prune_scores == 'learned':
      self.scorer = {
        str(layer): pruning.TokenScorer() for layer in self.prune_layers
      }

  def _attend(self) -> Any:
    if not self.window:
      return attend
    return functools.partial(
      window_attend,
      window=self.window,
      implementation=self.window_implementation,
    )

  def _head(self) -> Head:
    return Head(
      num_classes=self.num_classes,
      activation=self.pooler_activation,
      dropout=self.classifier_dropout,
      dtype=self.dtype,
    )

  def __call__(
    self,
    tokens: Int[Array, 'B L'],
    token_types: Int[Array, 'B L'],
    length: Int[Array, ' B'],
    row_keys: Key[Array, ' B'] | None = None,
    prune_scale: Float[Array, ''] | float = 1.0,
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies rows of token ids with all heads.

    Args:
      tokens: token ids, padded behind `length`.
      token_types: segment of each token.
      length: valid tokens of each row, at least 1.
      row_keys: one key per row turns dropout on.
      prune_scale: multiplies `prune_ratios`, in [0, 1]; may be traced.

    Returns:
      (logits of the last head, out), with float32 `out['exits']` `[E, B, O]`
      of all heads in the order of `heads()`, int32 `out['kept']` `[P, B]`
      tokens left after each pruning, int32 `out['positions']` `[B, L]` and
      `out['length']` `[B]` (the places of the tokens that are left come
      first), `out['features']` `[B, D]` under the last head, and with
      `restore` `out['tokens']` `[B, L, D]`.
    """
    heads = self.heads()
    start = self.embed(tokens, token_types, length, row_keys)
    encoded = self.encode(
      start, 1, heads[-1], heads=heads, row_keys=row_keys,
      prune_scale=prune_scale, full=start.x if self.restore else None,
    )  # fmt: skip
    exits = [
      self.classify(encoded.cls[layer], layer, row_keys) for layer in heads
    ]
    out = {
      'exits': jnp.stack(exits),
      'kept': jnp.stack(encoded.kept)
      if encoded.kept
      else jnp.zeros((0, length.shape[0]), jnp.int32),
      'positions': encoded.tokens.positions,
      'length': encoded.tokens.length,
      'features': self.features(encoded.cls[heads[-1]]),
    }
    if self.restore:
      out['tokens'] = pruning.restore(encoded.full, encoded.tokens)
    return exits[-1], out

  def embed(
    self,
    tokens: Int[Array, 'B L'],
    token_types: Int[Array, 'B L'],
    length: Int[Array, ' B'],
    row_keys: Key[Array, ' B'] | None = None,
  ) -> Tokens:
    """Embeds token ids; every token stands at its place."""
    x = self.embeddings(tokens, token_types, row_keys)
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return Tokens(x, length, jnp.broadcast_to(places[None], tokens.shape))

  def encode(
    self,
    tokens: Tokens,
    first: int,
    last: int,
    *,
    heads: Sequence[int] = (),
    row_keys: Key[Array, ' B'] | None = None,
    prune_scale: Float[Array, ''] | float = 1.0,
    sizes: Sequence[int] | None = None,
    full: Float[Array, 'B L D'] | None = None,
    keys_values: KeysValues | None = None,
  ) -> Encoded:
    """Runs the blocks `first` to `last`, with the pruning after each.

    Args:
      tokens: the tokens that are left.
      first: first layer, from 1.
      last: last layer.
      heads: layers whose [CLS] is wanted.
      row_keys: one key per row turns dropout on.
      prune_scale: multiplies `prune_ratios`.
      sizes: static sequence lengths after each of `prune_layers` (the
        gathered form); None keeps shapes (the masked form), and none at all,
        `()`, turns pruning off.
      full: states at the original places, kept up to date if given.
      keys_values: of the first block, if `cls_after` has computed them.
    """
    cls, kept = {}, []
    for layer in range(first, last + 1):
      keys = row_keys
      if keys is not None:
        keys = row_random.fold_rows(keys, f'block_{layer - 1}')
      prunes = layer in self.prune_layers and sizes != ()
      wants_received = prunes and self.prune_scores == 'attention'
      out: Any = self.block[layer - 1](
        tokens.x,
        tokens_mask(tokens),
        keys,
        return_received=wants_received,
        keys_values=keys_values if layer == first else None,
      )
      x, received = out if wants_received else (out, None)
      tokens = tokens._replace(x=x)
      if layer in heads:
        cls[layer] = x[:, 0]
      if prunes:
        if full is not None:
          full = pruning.restore(full, tokens)
        tokens = self._prune(tokens, layer, received, prune_scale, sizes)
        kept.append(tokens.length)
    return Encoded(tokens, cls, tuple(kept), full)

  def _prune(self, tokens, layer, received, prune_scale, sizes) -> Tokens:
    place = list(self.prune_layers).index(layer)
    ratio = jnp.asarray(self.prune_ratios[place], jnp.float32) * prune_scale
    if self.prune_scores == 'learned':
      x, scores = self.scorer[str(layer)](tokens.x)
      tokens = tokens._replace(x=x)
    elif self.prune_scores == 'attention':
      scores = received
    else:
      scores = pruning.norm_scores(tokens.x)
    return pruning.prune(
      tokens,
      scores,
      ratio,
      tokens.x.shape[1] if sizes is None else sizes[place],
      min_tokens=self.min_tokens,
      merge=self.merge,
    )

  def cls_after(
    self, tokens: Tokens, layer: int
  ) -> tuple[Float[Array, 'B D'], KeysValues]:
    """[CLS] after a block of which nothing else is needed: a sixth of it.

    Returns:
      ([CLS], keys and values of the block: the work that need not be done
      again, should the other tokens be needed).
    """
    x, keys_values = self.block[layer - 1](
      tokens.x, tokens_mask(tokens), num_queries=1, return_keys_values=True
    )
    return x[:, 0], keys_values

  def features(self, cls: Float[Array, 'B D']) -> Float[Array, 'B D']:
    """What the last classifier reads of [CLS], float32."""
    return self.pooler(cls).astype(jnp.float32)

  def classify(
    self,
    cls: Float[Array, 'B D'],
    layer: int,
    row_keys: Key[Array, ' B'] | None = None,
  ) -> Float[Array, 'B O']:
    """Logits of the head of a layer, float32."""
    if layer != self.heads()[-1]:
      if row_keys is not None:
        row_keys = row_random.fold_rows(row_keys, f'exit_{layer}')
      return self.exit[str(layer)](cls, row_keys)
    pooled = self.features(cls)
    return self.head(
      row_random.drop(pooled, self.classifier_dropout, row_keys, 'classifier')
    )

  def flops(self, input_shape: tuple[int, ...]) -> float:
    """FLOPs of one full row `[L]` through all layers, pruned, no exit."""
    length = input_shape[0]
    return sum(cost.stage_flops(self, length, cost.static_sizes(self, length)))


def tokens_mask(tokens: Tokens) -> Array:
  """bool `[B, S]`: the valid tokens, which come first."""
  return jnp.arange(tokens.x.shape[1])[None] < tokens.length[:, None]
