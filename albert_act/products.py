"""Matrix products of few tokens, with the kernels of a layer as `[out, in]`.

As Flax writes it, `[tokens, in] @ [in, out]`, a product of few tokens spends
most of its time on bringing the kernel into the order that it is read in. With
a kernel that is `[out, in]` the left factor, only the tokens are.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

# Numbers of tokens at which that is faster on a CPU, by up to a half; between
# and beyond them it is not (docs/measured.md).
KERNEL_LEFT = (1, 2, 4, 8, 16, 24, 32, 64, 128)


def transposed(params: Mapping[str, Any]) -> dict[str, Any]:
  """The parameters with the kernels of the layer as `[out, in]`."""
  return {
    name: jax.tree.map(_transposed, leaf) if name.startswith('block') else leaf
    for name, leaf in params.items()
  }


def _transposed(leaf: Any) -> Any:
  return leaf.T if leaf.ndim == 2 else leaf


def apply(
  module: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
  """`module.apply`, for variables whose kernels are `[out, in]`.

  Args:
    module: all its kernels belong to `nn.Dense`.
    variables: with the kernels transposed.
    *args: for the module.
    **kwargs: for the module.
  """
  with nn.intercept_methods(_dense):
    return module.apply(variables, *args, **kwargs)


def _dense(
  run: Callable[..., Any], args: Any, kwargs: Any, context: Any
) -> Any:
  """`nn.Dense` with a kernel `[out, in]`; anything else as it is."""
  module = context.module
  if not isinstance(module, nn.Dense):
    return run(*args, **kwargs)
  parameters = module.variables['params']
  promoted: Any = module.promote_dtype(
    *args, parameters['kernel'], parameters['bias'], dtype=module.dtype
  )
  x, kernel, bias = promoted
  return product(x, kernel) + bias.reshape((1,) * (x.ndim - 1) + (-1,))


def product(
  x: Float[Array, '*B D'], kernel: Float[Array, 'O D']
) -> Float[Array, '*B O']:
  """The product with a transposed kernel, in the form that takes least time."""
  tokens = x.reshape(-1, x.shape[-1])
  if len(tokens) not in KERNEL_LEFT:
    return _tokens_left(x, kernel)
  flat = jax.lax.platform_dependent(
    tokens, kernel, cpu=_kernel_left, default=_tokens_left
  )
  return flat.reshape(*x.shape[:-1], len(kernel))


def _tokens_left(x: Array, kernel: Array) -> Array:
  return jnp.matmul(x, kernel.T)


def _kernel_left(x: Array, kernel: Array) -> Array:
  # Without the barrier XLA turns it into the other form.
  return jax.lax.optimization_barrier(jnp.matmul(kernel, x.T)).T
