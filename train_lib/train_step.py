"""The one train step: pure, jitted, the same for every task.

Gradients of micro-batches add up exactly, because denominators come from the
whole batch and all noise of a row from the row's own key. A step whose loss
or gradient is not finite changes nothing but the counters.
"""

from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from eval_lib.metrics import Average, Leaf
from train_lib.optimizers import trainable_mask
from train_lib.task import Task


@flax.struct.dataclass
class TrainState:
  """Everything a run needs to go on; nothing else is saved.

  Attributes:
    step: steps done, also the position in the data stream, int32 `[]`.
    params: trained parameters, float32.
    model_state: what the model carries from step to step.
    opt_state: state of the optax chain.
    rng: key data, uint32 `[2]`.
    ema_params: exponential moving average of `params`, or None.
    nonfinite: steps in a row that were skipped as not finite, int32 `[]`.
  """

  step: Leaf
  params: Any
  model_state: Any
  opt_state: Any
  rng: Leaf
  ema_params: Any
  nonfinite: Leaf

  @property
  def eval_params(self) -> Any:
    """The parameters to evaluate and serve: the average if there is one."""
    return self.params if self.ema_params is None else self.ema_params


def init_state(
  task: Task,
  optimizer: optax.GradientTransformation,
  seed: int,
  ema_decay: float,
) -> TrainState:
  """A fresh state, boxed with logical axes; run it under jit or eval_shape."""
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

  Args:
    task: the model and its loss.
    optimizer: an optax chain that includes the learning rate.
    schedule: the learning rate, to be logged.
    num_micro: micro-batches per step; it must divide the rows of a batch.
    ema_decay: decay of the parameter average, 0 for none.
    trainable: regular expression of the parameters that change.

  Returns:
    A pure function to be jitted with the state donated.
  """

  def micro_step(params, model_state, frozen, batch, norm, row_keys, knobs):
    def loss_fn(params):
      return task.loss(
        params, model_state, frozen, batch, norm, row_keys, knobs
      )

    (loss, (metrics, model_state)), grads = jax.value_and_grad(
      loss_fn, has_aux=True
    )(params)
    return (grads, loss), metrics, model_state

  def accumulate(state, frozen, batch, knobs):
    rng = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
    norm = task.normalizers(batch)
    row_keys = jax.random.split(rng, batch['mask'].shape[0])
    micro = split_rows((dict(batch), row_keys), num_micro)

    def body(carry, rows):
      sums, model_state = carry
      micro_batch, keys = rows
      grads, metrics, model_state = micro_step(
        state.params, model_state, frozen, micro_batch, norm, keys, knobs
      )
      return (jax.tree.map(jnp.add, sums, grads), model_state), metrics

    sums = (jax.tree.map(jnp.zeros_like, state.params), jnp.zeros(()))
    ((grads, loss), model_state), metrics = jax.lax.scan(
      body, (sums, state.model_state), micro
    )
    metrics = {name: stacked.reduce() for name, stacked in metrics.items()}
    return loss, grads, metrics, model_state

  def train_step(state, frozen, batch, knobs):
    loss, grads, metrics, model_state = accumulate(state, frozen, batch, knobs)
    mask = trainable_mask(state.params, trainable)
    grads = _zero_unless(mask, grads)
    grad_norm = optax.tree.norm(grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, _zero_unless(mask, updates))
    changed = state.replace(
      params=params,
      model_state=model_state,
      opt_state=opt_state,
      ema_params=_ema(state.ema_params, params, ema_decay),
      nonfinite=jnp.zeros((), jnp.int32),
    )
    skipped = state.replace(nonfinite=state.nonfinite + 1)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    state = jax.tree.map(
      lambda new, old: jnp.where(finite, new, old), changed, skipped
    ).replace(step=state.step + 1)
    metrics |= {
      'loss': scalar(loss),
      'grad_norm': scalar(grad_norm),
      'learning_rate': scalar(jnp.asarray(schedule(state.step - 1))),
      'nonfinite': scalar(state.nonfinite),
    }
    return state, metrics

  return train_step


def split_rows(tree: Any, num_micro: int) -> Any:
  """Reshapes `[B, ...]` to `[num_micro, B / num_micro, ...]`, interleaved.

  Micro-batch i takes rows i, i + num_micro, ...: every device keeps the rows
  it has, where contiguous micro-batches would each sit on a few devices.
  """

  def split(rows):
    shape = (rows.shape[0] // num_micro, num_micro, *rows.shape[1:])
    return jnp.moveaxis(rows.reshape(shape), 1, 0)

  return jax.tree.map(split, tree)


def scalar(value: Float[Array, ''] | Int[Array, '']) -> Average:
  """A metric that holds one value of the step."""
  return Average(
    total=jnp.asarray(value, jnp.float32), count=jnp.ones((), jnp.float32)
  )


def _zero_unless(mask: Any, tree: Any) -> Any:
  return jax.tree.map(
    lambda keep, leaf: leaf if keep else jnp.zeros_like(leaf), mask, tree
  )


def _ema(average: Any, params: Any, decay: float) -> Any:
  if average is None:
    return None
  return jax.tree.map(
    lambda old, new: decay * old + (1 - decay) * new, average, params
  )
