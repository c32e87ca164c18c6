"""Matrix products of few tokens, with the kernels of a layer as `[out, in]`.

As `[tokens, in] @ [in, out]` a product of few tokens spends up to half of its
time on a CPU on bringing the kernel into the order that it is read in. With a
kernel `[out, in]` as the left factor only the tokens are. Not measured on other
devices; there the form stays as it is.
"""

import math
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
      other would be used transposed. Without dropout.
    variables: see `transposed`.
    *args: for the module.
    **kwargs: for the module.
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
    return _dense(context.module, *args)
  if isinstance(context.module, Mlp):
    # With rows of tokens XLA's activation takes memory of its own, beside that
    # of the hidden layer, which is most of what an iteration takes.
    (x,) = args
    tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return run(tokens, **kwargs).reshape(x.shape)
  return run(*args, **kwargs)


def _dense(module: nn.Dense, x: Array) -> Array:
  """`nn.Dense` with a kernel `[out, in]`."""
  params = module.variables['params']
  promoted: Any = module.promote_dtype(
    x, params['kernel'], params.get('bias'), dtype=module.dtype
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
