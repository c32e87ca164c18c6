"""What happens when a loss is not finite: stop, name the step and the cause."""

from typing import Any

import jax
import jax.numpy as jnp

from train_lib.optimizers import path_name
from train_lib.task import Task


class NonFiniteError(RuntimeError):
  """The loss or its gradient was NaN or infinite too many steps in a row.

  The parameters were not changed by those steps and nothing bad was saved.
  """

  def __init__(self, step: int, skipped: int, culprit: str):
    super().__init__(
      f'step {step}: the loss or its gradient is not finite ({skipped} in a '
      f'row; max_nonfinite_steps allows fewer); first not finite: {culprit}. '
      'No bad state was saved: lower optimizer.lr, lengthen '
      'optimizer.warmup_steps or set optimizer.clip_norm, and start again.'
    )
    self.step = step
    self.culprit = culprit


def first_culprit(
  task: Task, state: Any, frozen: Any, batch: Any, knobs: Any, step: int
) -> str:
  """Names the first input or gradient that is not finite.

  Only runs on the way out, so it may compile and wait. Parameters may have
  moved by the few steps since; then the cause may not show again. `step` is
  the number of steps done with the one that failed.
  """
  found = first_nonfinite(batch)
  if found:
    return f'input {found!r}'
  found = first_nonfinite(state.params)
  if found:
    return f'parameter {found!r}'
  rng = jax.random.fold_in(jax.random.wrap_key_data(state.rng), step - 1)
  keys = jax.random.split(rng, batch['mask'].shape[0])

  @jax.jit
  def gradient(params):
    norm = task.normalizers(batch)
    return jax.grad(
      lambda params: task.loss(
        params, state.model_state, frozen, batch, norm, keys, knobs
      )[0]
    )(params)

  found = first_nonfinite(gradient(state.params))
  return f'gradient of {found!r}' if found else 'the loss, and not again now'


def first_nonfinite(tree: Any) -> str | None:
  """The path of the first floating array with a NaN or infinity, or None."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    if floating and not bool(jnp.all(jnp.isfinite(leaf))):
      return path_name(path)
  return None
