"""Exact compaction: only running tokens are computed, with the same results.

A token that halts in step n still changes in step n, so a step ends by
projecting and caching its keys and values. Running tokens of all rows are
packed into one axis (see `packed_attention`), whose size is one of a few static
ones, chosen on the device.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from albert_act.encoder import Albert
from albert_act.packed_attention import Packed, PackedAttention
from halting import loop
from model_lib import blocks
from model_lib.layers import valid_tokens

# Sizes as shares of a batch's tokens. Each is compiled, so there are few; they
# are close below a half, where most of the time is saved.
SHARES = tuple(n / 32 for n in (*range(1, 15), 16, 20, 24, 32))
# Used instead of shares up to 64 tokens: sizes between hardly take less time.
FEW_TOKENS = (8, 16, 24, 32, 64)


@struct.dataclass
class Tokens:
  """The tokens of a batch between two iterations."""

  # Any because JAX builds these trees of other things than arrays.
  x: Any  # states, `[B, L, D]`
  keys: Any  # of the states, `[B, L, D]`
  values: Any  # the same
  valid: Any  # False for padding, `[B, L]`
  halting: Any  # the rule's state of each token, `[B, L]`
  iteration: Any  # iterations so far, int32 `[B]`


def sizes_for(rows: int, length: int) -> tuple[int, ...]:
  """Returns the sizes of packed tokens for batches of a shape, ascending."""
  most = rows * length
  shares = {round(share * most) for share in SHARES}
  shares = {size for size in shares if size > FEW_TOKENS[-1]}
  # The least is one token per row, as [CLS] often runs to the end alone.
  sizes = {rows, most} | shares | set(FEW_TOKENS)
  return tuple(sorted(size for size in sizes if rows <= size <= most))


def begin(
  model: Albert,
  tokens: Int[Array, 'B L'],
  token_types: Int[Array, 'B L'],
  length: Int[Array, ' B'],
) -> Tokens:
  """Embeds rows and projects the first keys and values.

  `length` is 0 for a row of padding.
  """
  x = model.embed(tokens, token_types)
  keys, values = model.block[0](x, num_queries=0).keys_values
  valid, zeros = valid_tokens(x, length), jnp.zeros(length.shape, jnp.int32)
  return Tokens(x, keys, values, valid, model.rule.start(valid), zeros)


def step(
  model: Albert, size: int, least: int = 1
) -> Callable[[Tokens], Tokens]:
  """Returns one iteration of `least` to `size` running tokens, in plain JAX."""
  run, limit = iteration(model), model.max_iterations

  def computed(tokens: Tokens) -> Tokens:
    packed = Packed.of(tokens.halting.running, size)
    x, keys, values = packed.pack(tokens.x), tokens.keys, tokens.values
    attention = PackedAttention(packed, keys, values, tokens.valid, least)
    is_last = (tokens.iteration == limit - 1)[packed.row]
    before = jax.tree.map(packed.pack, tokens.halting)
    made = run(attention, x, before, is_last, packed.first)
    state, keys, values, after = made
    return dataclasses.replace(
      tokens,
      x=packed.unpack(state, tokens.x),
      keys=packed.unpack(keys, tokens.keys),
      values=packed.unpack(values, tokens.values),
      halting=jax.tree.map(packed.unpack, after, tokens.halting),
      iteration=tokens.iteration + 1,
    )

  return computed


def iteration(model: Albert) -> Callable[..., Any]:
  """Returns a function that runs an iteration of packed tokens, in plain JAX.

  It takes the `attend` of the block, states `[M, D]`, states of the rule, where
  the iteration is the row's last `[M]`, and the place of the first token of
  each one's row `[M]`; it returns new states, keys and values `[M, D]`, and
  the rule's states.
  """
  bound: Any = model.block[0]
  block, variables = bound.unbind()
  score, rule = blocks.pure(model.score), model.rule

  def run(attend: Any, x: Any, before: Any, is_last: Any, first: Any) -> Any:
    # `attend` has the keys and values.
    nothing = jnp.zeros((1, 0, x.shape[-1]), x.dtype)
    attending = block.clone(attend=attend)
    done = attending.apply(variables, x[None], keys_values=(nothing, nothing))
    state = done.x[0]
    logits = score(state.astype(jnp.float32))[:, 0]
    if rule.PER_ROW:  # that of [CLS], which runs as long
      logits = jnp.take(logits, first, mode='clip')
    after, weight = rule.step(before, jax.nn.sigmoid(logits), is_last)
    if rule.MIXES:
      state = loop.combine('fed_back', x, state, weight).astype(x.dtype)
    projected = block.apply(variables, state[None], num_queries=0)
    keys, values = (leaf[0] for leaf in projected.keys_values)
    return state, keys, values, after

  return run


def iterate(
  model: Albert, tokens: Tokens, count: int, sizes: Sequence[int]
) -> Tokens:
  """Runs up to `count` iterations, or until all halt, with static `sizes`."""
  loop = tokens, jnp.zeros((), int)
  # The number of running tokens only falls: one loop per size, largest first. A
  # conditional in a single loop would copy all states, keys and values.
  for size, smaller in reversed([*zip(sizes, (0, *sizes), strict=False)]):
    run = step(model, size, smaller + 1)

    def goes_on(loop: Any, smaller: int = smaller) -> Bool[Array, '']:
      tokens, done = loop
      return (done < count) & (tokens.halting.running.sum() > smaller)

    def body(loop: Any, run: Callable[[Tokens], Tokens] = run) -> Any:
      tokens, done = loop
      return run(tokens), done + 1

    loop = jax.lax.while_loop(goes_on, body, loop)
  return loop[0]
