"""Blocks of equal shape in a row: scanned, and computed again for gradients.

Both are choices of a training, not of a model: `options` are read while a
program is traced, as Flax reads the rules of logical axes. Parameters keep
their names and places, `block_0`, `block_1`, ...: a scan stacks them inside the
program, which costs a copy of the blocks' parameters in the compute type.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

Remat = Literal['none', 'dots', 'full']
# What the forward pass keeps of a block for the gradient, beside its input.
POLICIES: dict[str, Any] = {
  'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  'full': jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class Options:
  """How blocks are compiled."""

  # XLA then compiles one block instead of each: a fraction of the time.
  scan: bool = False
  # Of a block, kept for its gradient: all; matrix products; only its input.
  remat: Remat = 'none'


PLAIN = Options()
_OPTIONS = contextvars.ContextVar('blocks', default=PLAIN)


@contextlib.contextmanager
def options(chosen: Options) -> Iterator[None]:
  """A context in which programs are traced with these options."""
  token = _OPTIONS.set(chosen)
  try:
    yield
  finally:
    _OPTIONS.reset(token)


def apply(
  blocks: Sequence[nn.Module],
  x: Any,
  mask: Any,
  keys: Sequence[Any],
  **fixed: Any,
) -> Any:
  """Returns `x = block(x, mask, key, **fixed)` of one block after the other.

  The blocks are equal but for their parameters; `keys` has one entry for each
  block, arrays or None.
  """
  chosen = _OPTIONS.get()
  if len(blocks) < 2 or chosen == PLAIN or blocks[0].is_initializing():
    for block, key in zip(blocks, keys, strict=True):
      x = block(x, mask, key, **fixed)
    return x
  # Linen modules must not be called inside a JAX transformation.
  pure = blocks[0].unbind()[0]
  variables = [dict(block.variables) for block in blocks]

  def body(x: Any, given: Any) -> tuple[Any, None]:
    return pure.apply(given[0], x, mask, given[1], **fixed), None

  if policy := POLICIES.get(chosen.remat):
    body = jax.checkpoint(body, policy=policy, prevent_cse=not chosen.scan)
  pairs = [*zip(variables, keys, strict=True)]
  if chosen.scan:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *pairs)
    return jax.lax.scan(body, x, stacked)[0]
  for pair in pairs:
    x = body(x, pair)[0]
  return x
