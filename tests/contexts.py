"""The context of evaluators, without a run."""

import jax

from eval_lib import evaluator
from train_lib import sharding


def eval_context(dataset, outputs=dict, batch_size=8, workdir='', **changes):
  """Returns a context whose functions do nothing but `outputs`.

  See `eval_lib.evaluator.EvalContext`.
  """
  fields = dict(
    measure=dict, features=dict, outputs=outputs, put=jax.device_put, seed=0,
    batch_size=batch_size, dataset=dataset, workdir=str(workdir),
  )  # fmt: skip
  return evaluator.EvalContext(**(fields | changes))


def evaluator_of(kind, dataset, context=(), /, **entry):
  """Returns an evaluator, named 'test', of `eval_context(**context)`."""
  context = eval_context(dataset, **dict(context))
  return evaluator.build('test', dict(type=kind) | entry, context)


def rows_on(devices):
  """Returns a function that puts batches on devices, row by row."""
  rows = sharding.by_rows(sharding.make_mesh({'data': devices}))
  return lambda batch: jax.device_put(batch, rows)
