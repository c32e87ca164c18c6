"""ALBERT's encoder: one shared layer, at a fixed depth or until tokens halt.

Lan et al. 2020; halting per token by Simoulin and Crabbe 2021 ("How Many Layers
and Why?", equations 1 to 8): `h^n = layer(h^{n-1})`, `p^n = sigmoid(W h^n +
b)`, and what goes on is `lambda^n h^n + (1 - lambda^n) h^{n-1}`, for the other
tokens too. By the straight-through rule a running token goes on with `h^n`
alone, and keeps `h^N`. Padding starts halted. Parameters stand where
`model_lib.huggingface` puts those of a published checkpoint. This is the masked
form; the one that saves is `albert_act.serving`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from albert_act import legal_fields
from model_lib import flops, halting, pondering, row_random
from model_lib.albert_sizes import AlbertSizes, resolve_sizes
from model_lib.bert import INIT, BertBlock, BertEmbeddings
from model_lib.logical import constrain, partitioned

# What a step's weight does: of the straight-through rule it is 0 until a token
# halts, and a state mixed by it would stand still until then.
COMBINATIONS = {'act': 'fed_back', 'straight_through': 'accumulated'}


@struct.dataclass
class Encoded:
  """What the encoder gives.

  Attributes:
    states: of all tokens after the last iteration, `[B, L, D]`.
    ponder: by token `[B, L]`: `steps` N, int32, and `cost` N + R, float32; both
      0 for padding. At a fixed depth both are that depth.
    depth: iterations that were executed for the batch, int32 scalar.
    trace: what `trace` gave, stacked over the iterations; or None.
  """

  states: Any
  ponder: dict[str, Any]
  depth: Any
  trace: Any = None


class Albert(nn.Module):
  """What ALBERT's models have in common.

  Attributes:
    num_classes: width of a classifier's logits; 1 for regression.
    variant: sizes by name, see `albert_sizes.VARIANTS`; the next five override
      it unless 0.
    width: width of the tokens.
    embedding_width: width of the embeddings.
    max_iterations: applications of the shared layer, at most with halting.
    mlp_dim: hidden width of the feed-forward network.
    num_heads: attention heads.
    num_groups: layers with weights of their own, each for a share of the
      iterations: as equal as can be, by Hugging Face's formula.
    inner_group: blocks in a layer.
    vocab_size: number of token ids.
    max_positions: longest sequence.
    type_vocab_size: number of token types, 0 for none.
    activation: of the feed-forward networks.
    norm_epsilon: of every LayerNorm.
    halting: '' for a fixed depth, or the rule of `halting.RULES` by which each
      token halts.
    epsilon: a token halts when its scores sum to `1 - epsilon`.
    halting_bias: initial bias of the score: -2 begins near 9 iterations.
    dynamic: stop when every token has halted (no gradient).
    remat_chunk: what is kept for the gradient, see `pondering.ponder_scan`.
    dropout: rate on embeddings and after attention.
    attention_dropout: rate on the attention weights.
    classifier_dropout: rate before a classifier.
    dtype: compute dtype; parameters, halting and logits are float32.
  """

  num_classes: int = 2
  variant: str = ''
  width: int = 0
  embedding_width: int = 0
  max_iterations: int = 0
  mlp_dim: int = 0
  num_heads: int = 0
  num_groups: int = 1
  inner_group: int = 1
  vocab_size: int = 30000
  max_positions: int = 512
  type_vocab_size: int = 2
  activation: str = 'gelu_new'
  norm_epsilon: float = 1e-12
  halting: str = 'act'
  epsilon: float = 0.01
  halting_bias: float = -2.0
  dynamic: bool = False
  remat_chunk: int = 0
  dropout: float = 0.0
  attention_dropout: float = 0.0
  classifier_dropout: float = 0.1
  dtype: Any = jnp.float32

  def sizes(self) -> AlbertSizes:
    """The sizes that the fields describe, and a check of all fields.

    Raises:
      ValueError: naming the field, what is legal and what is given.
    """
    sizes = resolve_sizes(
      self.variant,
      width=self.width,
      embedding_width=self.embedding_width,
      max_iterations=self.max_iterations,
      mlp_dim=self.mlp_dim,
      num_heads=self.num_heads,
    )
    legal_fields.check(self, sizes)
    return sizes

  def setup(self):
    """Declares the parameters; see the module for their names."""
    sizes = self.sizes()
    self.embeddings = BertEmbeddings(
      vocab_size=self.vocab_size,
      width=sizes.embedding_width,
      max_positions=self.max_positions,
      type_vocab_size=self.type_vocab_size,
      norm_epsilon=self.norm_epsilon,
      dropout=self.dropout,
      dtype=self.dtype,
    )
    self.projection = nn.Dense(
      sizes.width,
      dtype=self.dtype,
      kernel_init=partitioned(INIT, None, 'embed'),
      bias_init=partitioned(nn.initializers.zeros, 'embed'),
    )
    self.block = [
      BertBlock(
        num_heads=sizes.num_heads,
        mlp_dim=sizes.mlp_dim,
        activation=self.activation,
        norm_epsilon=self.norm_epsilon,
        dropout=self.dropout,
        attention_dropout=self.attention_dropout,
        dtype=self.dtype,
      )
      for _ in range(self.num_groups * self.inner_group)
    ]
    if self.halting:
      self.score = nn.Dense(
        1,
        dtype=jnp.float32,
        kernel_init=partitioned(INIT, 'embed', None),
        bias_init=partitioned(
          nn.initializers.constant(self.halting_bias), None
        ),
      )

  def embed(
    self,
    tokens: Int[Array, 'B L'],
    token_types: Int[Array, 'B L'],
    row_keys: Key[Array, ' B'] | None = None,
  ) -> Float[Array, 'B L D']:
    """`h^0`: the factorised embeddings, projected to the width."""
    x = self.projection(self.embeddings(tokens, token_types, row_keys))
    return constrain(x, 'batch', 'length', 'embed')

  def encode(
    self,
    tokens: Int[Array, 'B L'],
    token_types: Int[Array, 'B L'],
    length: Int[Array, ' B'],
    row_keys: Key[Array, ' B'] | None = None,
    trace: pondering.Trace | None = None,
  ) -> Encoded:
    """Embeds tokens and applies the shared layer.

    Args:
      tokens: token ids, padded behind `length`.
      token_types: segment of each token.
      length: valid tokens of each row, at least 1.
      row_keys: one key per row turns dropout on.
      trace: looked at in every iteration, see `pondering.ponder_scan`.

    Raises:
      ValueError: a trace of the dynamic form, which has none.
    """
    x = self.embed(tokens, token_types, row_keys)
    valid = jnp.arange(tokens.shape[1])[None] < length[:, None]
    step = self._pure_step(x, valid, row_keys)
    if self.halting:
      return self._ponder(step, x, valid, trace)
    return self._repeat(step, x, valid, trace)

  def _ponder(
    self,
    step: pondering.Step,
    x: Float[Array, 'B L D'],
    valid: Bool[Array, 'B L'],
    trace: pondering.Trace | None,
  ) -> Encoded:
    options: dict[str, Any] = {}
    if not self.dynamic:
      options = {'remat_chunk': self.remat_chunk, 'trace': trace}
    elif trace is not None:
      raise ValueError('trace: expected None with dynamic=True')
    ponder = pondering.ponder_while if self.dynamic else pondering.ponder_scan
    result = ponder(
      step,
      x,
      valid,
      max_steps=self.sizes().max_iterations,
      rule=halting.rule(self.halting, self.epsilon),
      combination=COMBINATIONS[self.halting],
      **options,
    )
    spent = {
      'steps': result.halting.steps,
      'cost': halting.ponder_cost(result.halting),
    }
    return Encoded(
      result.output.astype(self.dtype), spent, result.depth, result.trace
    )

  def _repeat(
    self,
    step: pondering.Step,
    x: Float[Array, 'B L D'],
    valid: Bool[Array, 'B L'],
    trace: pondering.Trace | None,
  ) -> Encoded:
    """A fixed depth: every iteration replaces the states of all tokens."""
    iterations = self.sizes().max_iterations

    def body(state: Array, n: Array) -> tuple[Array, Any]:
      new, _ = step(state, n)
      steps = jnp.where(valid, n + 1, 0)
      spent = dataclasses.replace(halting.start(valid), steps=steps)
      return new, None if trace is None else trace(state, new, spent)

    x, traced = pondering.scan_steps(body, x, iterations, self.remat_chunk)
    steps = jnp.where(valid, iterations, 0)
    spent = {'steps': steps, 'cost': steps.astype(jnp.float32)}
    return Encoded(x, spent, jnp.asarray(iterations, jnp.int32), traced)

  def _pure_step(
    self,
    x: Float[Array, 'B L D'],
    valid: Bool[Array, 'B L'],
    row_keys: Key[Array, ' B'] | None,
  ) -> pondering.Step:
    """`(state, n) -> (layer(state), score)`, in plain JAX for a loop."""
    if self.is_initializing():
      for block in self.block:
        block(x, valid)
      if self.halting:
        self.score(x)
    groups = [
      [block.unbind() for block in self.block[start : start + self.inner_group]]
      for start in range(0, len(self.block), self.inner_group)
    ]
    score = self.score.unbind() if self.halting else None
    limit = self.sizes().max_iterations
    # Hugging Face's formula, with its rounding.
    group_of = [int(n / (limit / self.num_groups)) for n in range(limit)]

    def layer(group: list[Any], state: Array, keys: Any) -> Array:
      for number, (block, variables) in enumerate(group):
        own = keys
        if keys is not None:
          own = row_random.fold_rows(keys, f'block_{number}')
        state = block.apply(variables, state, valid, own)
      return state

    def step(state: Array, n: Array) -> tuple[Array, Any]:
      keys = None if row_keys is None else row_random.fold_rows(row_keys, n)
      branches: list[Callable[..., Any]] = [
        lambda state, keys, group=group: layer(group, state, keys)
        for group in groups
      ]
      if len(branches) == 1:
        state = branches[0](state, keys)
      else:
        group = jnp.asarray(group_of)[n]
        state = jax.lax.switch(group, branches, state, keys)
      if score is None:
        return state, None
      module, variables = score
      logits: Any = module.apply(variables, state.astype(jnp.float32))
      return state, jax.nn.sigmoid(logits[..., 0])

    return step

  def encoder_flops(
    self, tokens: int | float, iterations: float | None = None
  ) -> float:
    """FLOPs of the encoder for one row; see `flops`.

    Args:
      tokens: of the row.
      iterations: mean over the tokens; None for the most.
    """
    sizes = self.sizes()
    block = flops.block(tokens, sizes.width, sizes.mlp_dim)
    step = self.inner_group * block
    step += flops.dense(tokens, sizes.width, 1) if self.halting else 0.0
    times = sizes.max_iterations if iterations is None else iterations
    embed = flops.dense(tokens, sizes.embedding_width, sizes.width)
    return embed + times * step
