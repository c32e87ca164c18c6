"""Applies a layer with transposed kernels `[out, in]`, fast for few tokens.

A product `[tokens, in] @ [in, out]` of few tokens spends up to half of its time
on a CPU on reordering the kernel. With a kernel `[out, in]` as the left factor
only the tokens are reordered. Other devices keep the usual product.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from model_lib.layers import Mlp

# Numbers of tokens for which `kernel_left` was measured to be faster
# (docs/albert_act.md); for some others it is slower.
KERNEL_LEFT = (1, 2, 4, 8, 16, 24, 32, 64, 128)


def transpose(params: Mapping[str, Any]) -> dict[str, Any]:
  """Returns unboxed parameters, the matrices of the layer as `[out, in]`."""
  return {
    name: jax.tree.map(_transposed, leaf) if name.startswith('block') else leaf
    for name, leaf in nn.unbox(params).items()
  }


def _transposed(leaf: Any) -> Any:
  return leaf.T if leaf.ndim == 2 else leaf


def apply(
  module: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
  """Calls `module.apply` with variables of `transpose`, without dropout.

  All matrices of the module are kernels of `nn.Dense` of default precision.
  """
  with nn.intercept_methods(_layer):
    return module.apply(variables, *args, **kwargs)


def _layer(run, args, kwargs, context) -> Any:
  """Replaces the calls of `nn.Dense` and `Mlp`."""
  if context.method_name == '__call__':
    if isinstance(context.module, nn.Dense):
      return _dense(context.module, *args, **kwargs)
    if isinstance(context.module, Mlp):
      return _mlp(run, *args, **kwargs)
  return run(*args, **kwargs)


def _mlp(run: Callable[..., Any], x: Array, row_keys: Any = None) -> Array:
  """Applies `Mlp` to flattened tokens `[M, D]`, without dropout.

  XLA's CPU compiler computes an activation such as `gelu_new` of the hidden
  layer in place if its shape is `[M, D]`, but not if it is `[1, M, D]`.
  """
  return run(x.reshape(-1, x.shape[-1]), row_keys).reshape(x.shape)


def _dense(module: nn.Dense, inputs: Array) -> Array:
  """Applies `nn.Dense` with a kernel `[out, in]`."""
  params = module.variables['params']
  promoted: Any = module.promote_dtype(
    inputs, params['kernel'], params.get('bias'), dtype=module.dtype
  )
  x, kernel, bias = promoted
  out = product(x, kernel)
  if bias is None:
    return out
  return out + bias.reshape((1,) * (x.ndim - 1) + (-1,))


def product(
  x: Float[Array, '*B D'], kernel: Float[Array, 'O D']
) -> Float[Array, '*B O']:
  """Multiplies tokens by a transposed kernel, in their common dtype.

  On a CPU the kernel is the left factor for the numbers of tokens in
  `KERNEL_LEFT`.
  """

  def tokens_left(x: Array, kernel: Array) -> Array:
    return jnp.matmul(x, kernel.T)

  def kernel_left(x: Array, kernel: Array) -> Array:
    # Without the barrier XLA rewrites it to the other form.
    return jax.lax.optimization_barrier(jnp.matmul(kernel, x.T)).T

  tokens = x.reshape(-1, x.shape[-1])
  if tokens.shape[0] not in KERNEL_LEFT:
    return tokens_left(x, kernel)
  flat = jax.lax.platform_dependent(
    tokens, kernel, cpu=kernel_left, default=tokens_left
  )
  return flat.reshape(*x.shape[:-1], len(kernel))
