"""The train step: pure, jitted, the same for every task.

Gradients of micro-batches add up exactly: denominators are counted over the
whole batch, all noise of a row comes from its own key. A step whose loss,
gradient or next carry is not finite updates only `step` and `nonfinite`.
"""

import math
from collections.abc import Callable
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from core.errors import UserError
from eval_lib.metrics import Average, Leaf
from train_lib.optimizers import num_updates, path_name, trainable_mask
from train_lib.task import Task


@flax.struct.dataclass
class TrainState:
  """All that a checkpoint stores."""

  step: Leaf  # finished steps: the position in the data stream, int32
  params: Any  # float32
  model_state: Any  # mutable collections, e.g. batch statistics
  opt_state: Any
  rng: Leaf  # key data, uint32 [2]
  ema_params: Any  # debiased moving average of `params`, or None
  nonfinite: Leaf  # steps in a row that were skipped as not finite, int32
  carry: Any = None  # arrays [B, ...] of `Task.init_carry`, split by rows

  @property
  def variables(self) -> dict[str, Any]:
    """The variables to evaluate: with averaged parameters if there are any."""
    params = self.params if self.ema_params is None else self.ema_params
    return {'params': params, 'model_state': self.model_state}


def init_state(
  task: Task,
  optimizer: optax.GradientTransformation,
  seed: int,
  ema_decay: float,
  rows: int = 0,
) -> TrainState:
  """Returns a fresh state, boxed with logical axes; run it under jit.

  `rows` is the size of the batch, for the carry.
  """
  init_rng, train_rng = jax.random.split(jax.random.key(seed))
  params, model_state = task.init(init_rng)
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    model_state=model_state,
    opt_state=optimizer.init(params),
    rng=jax.random.key_data(train_rng),
    # A copy: a buffer may not be donated twice.
    ema_params=jax.tree.map(jnp.copy, params) if ema_decay else None,
    nonfinite=jnp.zeros((), jnp.int32),
    carry=jax.tree.map(
      lambda x: nn.LogicallyPartitioned(x, ('batch',)), task.init_carry(rows)
    ),
  )


def make_train_step(
  task: Task,
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
  num_micro: int = 1,
  ema_decay: float = 0.0,
  trainable: str = '.*',
) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
  """Builds `train_step(state, frozen, batch, knobs) -> (state, metrics)`.

  Jit it with the state donated. `optimizer` applies the learning rate,
  `schedule` only logs it, without `optimizer.scales`. Parameters whose paths
  match `trainable` are trained.
  """

  def train_step(state, frozen, batch, knobs):
    # The optimizer counts only the steps that were not skipped.
    rate = schedule(num_updates(state.opt_state))
    loss, grads, metrics, model_state, carry = _accumulate(
      task, num_micro, state, frozen, batch, knobs
    )
    mask = trainable_mask(state.params, trainable)
    grads = _zero_unless(mask, grads)
    grad_norm = optax.tree.norm(grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, _zero_unless(mask, updates))
    changed = state.replace(
      params=params,
      model_state=model_state,
      opt_state=opt_state,
      ema_params=_averaged(state.ema_params, params, opt_state, ema_decay),
      nonfinite=jnp.zeros((), jnp.int32),
      carry=carry,
    )
    skipped = state.replace(nonfinite=state.nonfinite + 1)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    for leaf in jax.tree.leaves(carry):
      finite &= jnp.isfinite(leaf).all()
    state = jax.tree.map(
      lambda new, old: jnp.where(finite, new, old), changed, skipped
    ).replace(step=state.step + 1)
    count = jnp.ones((), jnp.float32)
    scalars = dict(loss=loss, grad_norm=grad_norm, learning_rate=rate)
    scalars['nonfinite'] = state.nonfinite
    for name, value in scalars.items():
      metrics[name] = Average(jnp.asarray(value, jnp.float32), count)
    return state, metrics

  return train_step


def _averaged(average: Any, params: Any, opt_state: Any, decay: float) -> Any:
  """Returns `optax.ema` of the parameters, debiased: readers need no `n`."""
  if average is None:
    return None
  log = math.log(decay)
  new = math.expm1(log) / jnp.expm1(log * num_updates(opt_state))
  return jax.tree.map(lambda x, y: (1 - new) * x + new * y, average, params)


def _accumulate(task: Task, num_micro: int, state, frozen, batch, knobs):
  """Returns (loss, gradients, metrics, model_state, carry) of a whole batch."""
  batch = task.carried(state.carry, batch)
  norm = task.normalizers(batch)
  key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
  keys = jax.random.split(key, batch['mask'].shape[0])  # of the rows
  micro = jax.tree.map(
    lambda x: _micro_batches(x, num_micro, task.rows_together),
    (dict(batch), keys),
  )

  def body(before, rows):
    sums, model_state = before
    (loss, (metrics, model_state, carry)), grads = jax.value_and_grad(
      lambda params: task.loss(
        params, model_state, frozen, rows[0], norm, rows[1], knobs
      ),
      has_aux=True,
    )(state.params)
    sums = jax.tree.map(jnp.add, sums, (grads, loss))
    return (sums, model_state), (metrics, carry)

  sums = (jax.tree.map(jnp.zeros_like, state.params), jnp.zeros(()))
  ((grads, loss), model_state), (metrics, carry) = jax.lax.scan(
    body, (sums, state.model_state), micro
  )
  metrics = {name: stacked.reduce() for name, stacked in metrics.items()}
  carry = jax.tree.map(lambda x: _whole_batch(x, task.rows_together), carry)
  return loss, grads, metrics, model_state, carry


def _micro_batches(x: Any, num_micro: int, together: int) -> Any:
  """Splits rows `[B, ...]` into micro-batches `[num_micro, R, ...]`.

  Micro-batch i has the groups i, i + num_micro, ... of rows that stay together:
  no row changes its device.
  """
  groups = x.reshape(-1, num_micro, together, *x.shape[1:]).swapaxes(0, 1)
  return groups.reshape(num_micro, -1, *x.shape[1:])


def _whole_batch(x: Any, together: int) -> Any:
  """Inverse of `_micro_batches`: returns rows `[B, ...]` in their order."""
  groups = x.reshape(len(x), -1, together, *x.shape[2:]).swapaxes(0, 1)
  return groups.reshape(-1, *x.shape[2:])


def _zero_unless(mask: Any, tree: Any) -> Any:
  return jax.tree.map(
    lambda keep, leaf: leaf if keep else jnp.zeros_like(leaf), mask, tree
  )


class NonFiniteError(UserError, RuntimeError):
  """The loss or its gradient was NaN or infinite too many steps in a row."""

  exit_code = 3
  in_all_processes = True

  def __init__(self, step: int, skipped: int, culprit: str):
    super().__init__(
      f'step {step}: the loss or its gradient is not finite ({skipped} in a '
      f'row, limit: max_nonfinite_steps); first not finite: {culprit}. '
      'No bad state was saved: lower optimizer.lr, lengthen '
      'optimizer.warmup_steps or set optimizer.clip_norm, and start again.'
    )


def first_culprit(
  task: Task, state: Any, frozen: Any, batch: Any, knobs: Any, step: int
) -> str:
  """Names the first input, parameter, gradient or carry that is not finite.

  Recomputes the gradients of `step`, counted from 1; the state is up to
  `trainer.LAG` steps newer, so the cause may not be reproduced.
  """
  begun = state.replace(step=jnp.int32(step - 1))
  again = jax.jit(lambda *args: _accumulate(task, 1, *args))
  trees = {
    'input': lambda: batch,
    'parameter': lambda: state.params,
    'gradient of': lambda: again(begun, frozen, batch, knobs)[1],
    'carry': lambda: again(begun, frozen, batch, knobs)[-1],
  }
  for kind, tree in trees.items():
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree()):
      floating = jnp.issubdtype(leaf.dtype, jnp.floating)
      if floating and not bool(jnp.isfinite(leaf).all()):
        return f'{kind} {path_name(path)!r}'
  return 'only the loss, or not reproduced'
