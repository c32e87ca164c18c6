"""A layer in the forms that its matrix products and activation are fast in.

Kernels are `[out, in]`. As `[tokens, in] @ [in, out]` a product of few tokens
spends up to half of its time on a CPU on bringing the kernel into the order
that it is read in. With a kernel `[out, in]` as the left factor only the tokens
are. Not measured on other devices; there the product stays as it is.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from model_lib.layers import Mlp

# Numbers of tokens of which that was measured to be faster, see
# docs/measured.md; of some others it is slower.
KERNEL_LEFT = (1, 2, 4, 8, 16, 24, 32, 64, 128)


def transposed(params: Mapping[str, Any]) -> dict[str, Any]:
  """The parameters with every matrix of the layer transposed: `[out, in]`.

  Args:
    params: of the model, by name; partitioned ones lose their names of axes.
  """
  return {
    name: jax.tree.map(_transposed, leaf) if name.startswith('block') else leaf
    for name, leaf in nn.unbox(params).items()
  }


def _transposed(leaf: Any) -> Any:
  return leaf.T if leaf.ndim == 2 else leaf


def apply(
  module: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
  """`module.apply`, for variables whose kernels are `[out, in]`.

  Args:
    module: its matrices are kernels of `nn.Dense` of default precision; any
      other would be used transposed.
    variables: see `transposed`.
    *args: for the module.
    **kwargs: for the module.

  Raises:
    ValueError: an `Mlp` in the module is given keys for dropout.
  """
  with nn.intercept_methods(_layer):
    return module.apply(variables, *args, **kwargs)


def _layer(
  run: Callable[..., Any], args: Any, kwargs: Any, context: Any
) -> Any:
  """A method of `nn.Dense` or `Mlp` in its own form; any other as it is."""
  if context.method_name != '__call__':
    return run(*args, **kwargs)
  if isinstance(context.module, nn.Dense):
    return _dense(context.module, *args, **kwargs)
  if isinstance(context.module, Mlp):
    return _mlp(run, *args, **kwargs)
  return run(*args, **kwargs)


def _mlp(run: Callable[..., Any], x: Array, row_keys: Any = None) -> Array:
  """`Mlp` of tokens that stand in no rows.

  The hidden layer is the largest array of an iteration. XLA's CPU compiler
  writes an activation such as `gelu_new` over it if that is `[M, D]`, and
  beside it if it is `[1, M, D]`.
  """
  # Without rows it has no dropout, and says so.
  return run(x.reshape(-1, x.shape[-1]), row_keys).reshape(x.shape)


def _dense(module: nn.Dense, inputs: Array) -> Array:
  """`nn.Dense` with a kernel `[out, in]`."""
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
  """The product with a transposed kernel, of the dtype of both.

  On a CPU the kernel is the left factor for the numbers of tokens in
  `KERNEL_LEFT`.
  """
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
