"""Blocks of equal shape in a row: scanned, and computed again for gradients.

Both are choices of a training: `options` are read while a program is traced, as
Flax reads the rules of logical axes. Parameters keep their names `block_0`,
`block_1`, ...: a scan stacks a copy of them inside the program. Blocks take
random keys as arguments: no `make_rng`, no mutable collections.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

# What the forward pass keeps of a block for the gradient; always its input.
POLICIES: dict[str, Any] = {
  'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  'full': jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class Options:
  """How blocks are compiled."""

  scan: bool = False  # blocks of equal shape that follow each other
  # Of a block, kept for its gradient: all; matrix products; only its input.
  remat: Literal['none', 'dots', 'full'] = 'none'


_OPTIONS = contextvars.ContextVar('blocks', default=Options())  # noqa: B039


@contextlib.contextmanager
def options(chosen: Options) -> Iterator[None]:
  """A context in which programs are traced with these options."""
  token = _OPTIONS.set(chosen)
  try:
    yield
  finally:
    _OPTIONS.reset(token)


def again(function: Callable[..., Any], in_scan: bool = False) -> Any:
  """Returns a pure function that is computed again where the options say so."""
  policy = POLICIES.get(_OPTIONS.get().remat)
  if policy is None:
    return function
  return jax.checkpoint(function, policy=policy, prevent_cse=not in_scan)


def call(block: nn.Module, *args: Any, **fixed: Any) -> Any:
  """Returns `block(*args, **fixed)`, computed again for the gradient."""
  if _OPTIONS.get().remat == 'none' or block.is_initializing():
    return block(*args, **fixed)
  # Linen modules must not be called inside a JAX transformation.
  pure, variables = block.unbind()
  run = again(lambda *operands: pure.apply(*operands, **fixed))
  return run(variables, *args)


def pure(layer: nn.Module, *example: Any) -> Callable[..., Any]:
  """Returns `layer` with its variables, for a plain JAX loop.

  Linen modules must not be called in one. Initialises by the `example` first.
  """
  if layer.is_initializing():
    layer(*example)
  module, variables = layer.unbind()
  return functools.partial(module.apply, variables)


def apply(
  blocks: Sequence[nn.Module],
  x: Any,
  mask: Any,
  keys: Sequence[Any],
  result: Callable[[Any], Any] = lambda x: x,
  **fixed: Any,
) -> Any:
  """Returns `x = result(block(x, mask, key, **fixed))` of all blocks in turn.

  The blocks are equal but for their parameters; `keys` has one for each.
  """
  scan = _OPTIONS.get().scan and len(blocks) > 1
  if not scan or blocks[0].is_initializing():
    for block, key in zip(blocks, keys, strict=True):
      x = result(call(block, x, mask, key, **fixed))
    return x
  pure = blocks[0].unbind()[0]

  def body(x: Any, layer: Any) -> tuple[Any, None]:
    variables, key = layer
    return result(pure.apply(variables, x, mask, key, **fixed)), None

  pairs = [(dict(b.variables), k) for b, k in zip(blocks, keys, strict=True)]
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *pairs)
  return jax.lax.scan(again(body, in_scan=True), x, stacked)[0]
