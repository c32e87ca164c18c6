"""Exact compaction: halted tokens leave the computation, and change nothing.

A token that halts in step n still changes once, in step n, after its last keys
and values were read. So keys and values are projected from the *updated* state
at the end of a step and kept; everything else runs for the tokens that still
run only. Those of all rows are packed behind each other, so that a row with
many makes no others wait; only for attention they stand in rows. The packed
tokens have one of a few static sizes, which is chosen on the device.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from albert_act import packed_attention, products
from albert_act.encoder import COMBINATIONS, Albert
from albert_act.packed import Packed
from model_lib import halting

# Shares of a batch's tokens that are computed. Each is compiled, so there are
# few; below a half they are close, for there most of the time is saved.
SHARES = tuple(n / 32 for n in (*range(1, 15), 16, 20, 24, 32))
# They replace shares up to the last of them: another size there takes hardly
# less time than the next of these, on a CPU (docs/measured.md).
FEW_TOKENS = (8, 16, 24, 32, 64)


@struct.dataclass
class Tokens:
  """The tokens of a batch between two iterations.

  Fields are Any because JAX builds these trees of other things than arrays.

  Attributes:
    x: states, `[B, L, D]`.
    keys: `[B, N, L, H]`, of the states `x`.
    values: the same; zero for tokens that are not real.
    valid: which tokens are real, `[B, L]`.
    halting: how far each has come, `[B, L]`.
    iteration: iterations that were run, int32 `[B]`.
  """

  x: Any
  keys: Any
  values: Any
  valid: Any
  halting: Any
  iteration: Any


def sizes_for(rows: int, length: int) -> tuple[int, ...]:
  """The numbers of tokens that are computed, for batches of a shape.

  Besides those of `SHARES` and `FEW_TOKENS` one for each row, as [CLS] often
  runs to the end alone; none is smaller.
  """
  most = rows * length
  shares = {round(share * most) for share in SHARES}
  shares = {size for size in shares if size > FEW_TOKENS[-1]}
  sizes = {rows, most} | shares | set(FEW_TOKENS)
  return tuple(sorted(size for size in sizes if rows <= size <= most))


def begin(
  model: Albert,
  tokens: Int[Array, 'B L'],
  token_types: Int[Array, 'B L'],
  length: Int[Array, ' B'],
) -> Tokens:
  """Embeds rows, and projects the first keys and values.

  Args:
    model: bound to `products.transposed` parameters.
    tokens: token ids, padded behind `length`.
    token_types: segment of each token.
    length: valid tokens of each row; 0 for a row of padding.
  """
  x = model.embed(tokens, token_types)
  block, variables = model.block[0].unbind()
  projected = products.apply(
    block, variables, x, num_queries=0, return_keys_values=True
  )
  keys, values = projected[1]
  valid = jnp.arange(x.shape[1])[None] < length[:, None]
  return Tokens(
    x=x,
    keys=keys,
    # They stay zero, as those tokens never run; see `packed_attention`.
    values=jnp.where(valid[:, None, :, None], values, 0),
    valid=valid,
    halting=halting.start(valid),
    iteration=jnp.zeros(length.shape, jnp.int32),
  )


def step(
  model: Albert, size: int, least: int = 1
) -> Callable[[Tokens], Tokens]:
  """One iteration of `least` to `size` tokens of a batch, in plain JAX.

  Args:
    model: bound to `products.transposed` parameters; one group of one block.
    size: room for so many tokens; no more may run in all rows.
    least: no fewer run.
  """
  block, variables = model.block[0].unbind()
  score, score_variables = model.score.unbind()
  rule = halting.rule(model.halting, model.epsilon)
  limit = model.sizes().max_iterations

  def computed(tokens: Tokens) -> Tokens:
    packed = Packed.of(tokens.halting.running, size)
    x = packed.pack(tokens.x)
    attention = packed_attention.attention_to(
      packed, tokens.keys, tokens.values, tokens.valid, least
    )
    attending = block.clone(attend=attention)
    nothing = tokens.keys[:1, :, :0]  # `attention` has the keys and values
    new = products.apply(
      attending, variables, x[None], keys_values=(nothing, nothing)
    )
    logits: Any = score.apply(score_variables, new[0].astype(jnp.float32))
    is_last = (tokens.iteration == limit - 1)[packed.row]
    before = jax.tree.map(packed.pack, tokens.halting)
    after, weight = rule(before, jax.nn.sigmoid(logits[..., 0]), is_last)
    state = new[0]
    if COMBINATIONS[model.halting] == 'fed_back':
      state = halting.combine('fed_back', x, state, weight).astype(x.dtype)
    projected = products.apply(
      block, variables, state[None], num_queries=0, return_keys_values=True
    )
    keys, values = (leaf[0] for leaf in projected[1])
    return dataclasses.replace(
      tokens,
      x=packed.unpack(state, tokens.x),
      keys=packed.unpack_heads(keys, tokens.keys),
      values=packed.unpack_heads(values, tokens.values),
      halting=jax.tree.map(packed.unpack, after, tokens.halting),
      iteration=tokens.iteration + 1,
    )

  return computed


def iterate(
  model: Albert, tokens: Tokens, count: int, sizes: Sequence[int]
) -> Tokens:
  """Runs up to `count` iterations; fewer if every token has halted.

  Args:
    model: bound to `products.transposed` parameters; one group of one block.
    tokens: before the iterations.
    count: how many at most.
    sizes: see `sizes_for`; the last holds all tokens.
  """
  loop = tokens, jnp.zeros((), int)
  # Tokens only halt, so the sizes have their turn once, the largest first. A
  # conditional in one loop would copy all states, keys and values each time.
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
