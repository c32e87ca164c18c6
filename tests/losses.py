"""The loss of a task and its metrics, compiled."""

import jax


def of(task):
  """A function of parameters, a batch and more; returns (loss, metrics)."""

  @jax.jit
  def loss(params, batch, knobs=(), frozen=(), keys=None, state=()):
    given = dict(frozen), batch, task.normalizers(batch), keys, dict(knobs)
    value, (metrics, *_) = task.loss(params, dict(state), *given)
    return value, metrics

  return loss
