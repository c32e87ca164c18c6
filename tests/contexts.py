"""What an evaluator needs of a run, without a run."""

import jax

from eval_lib import evaluator


def eval_context(dataset, outputs, batch_size, workdir=''):
  """The context of evaluators that ask only for `outputs`, a jitted function.

  See `eval_lib.evaluator.EvalContext`.
  """
  return evaluator.EvalContext(
    measure=lambda variables, batch: {},
    features=lambda variables, batch: None,
    put=jax.device_put,
    seed=0,
    batch_size=batch_size,
    dataset=dataset,
    workdir=str(workdir),
    outputs=outputs,
  )
