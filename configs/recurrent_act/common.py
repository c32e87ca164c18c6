"""What the experiments of recurrent_act share: their arguments and defaults.

Arguments of every file beside this one:

  rule         act (default), straight_through, skip (Skip-ACT), or fixed:
               always `repetitions` of the cell, the baseline of Fojo's thesis
  cell         rnn, gru or lstm
  tau          weight of the ponder cost, `loss.ponder_weight`
  repetitions  most repetitions at an input; 0: 10, of rule fixed 2. Graves
               (2016) stops at 100, and at 20 in addition. A training step
               takes the time of all of them, so a small limit is faster
  mu           of Skip-ACT, the largest score; 0: 5
  length       numbers in a vector of parity, inputs in a sequence of the
               others; 0: as in the paper
  steps, width, batch, lr, seed

Adam without decay or warm-up. Graves trains with a learning rate of 1e-4 and
16 asynchronous workers, Fojo with 1e-3 and one. Gradients are clipped at a
norm of 1 here, which neither says.
"""

from typing import Any

import ml_collections

from configs import common

RULES = ('act', 'straight_through', 'skip', 'fixed')


def experiment(
  arg: str,
  task: str,
  cells: tuple[str, ...],
  num_targets: int = 1,
  **defaults: Any,
) -> ml_collections.ConfigDict:
  """A task of `dataset_lib.graves` with a pondering cell.

  Args:
    arg: the argument of the config file; see the module.
    task: its name in `dataset_lib.graves`.
    cells: the legal cells, the default first.
    num_targets: targets at a step.
    **defaults: of the arguments that differ between the tasks, and further
      fields of the data set, which are arguments as well.

  Raises:
    ValueError: for an illegal argument.
  """
  shared = dict(
    rule=RULES, cell=cells, tau=1e-3, steps=10_000, repetitions=0, mu=0,
    length=0, width=128, batch=32, lr=1e-3, seed=0,
  )  # fmt: skip
  a = common.parse_arg(arg, **(shared | defaults))
  c = common.base()
  c.seed = a.seed
  c.task = 'recurrent_act.task:SequenceTask'
  c.batch_size = a.batch
  data = {name: a[name] for name in defaults if name not in shared}
  c.dataset = dict(name='graves', task=task, length=a.length, **data)
  fixed, skips = a.rule == 'fixed', a.rule == 'skip'
  c.model = dict(
    name='recurrent_act.model:RecurrentModel',
    num_targets=num_targets,
    cell=a.cell,
    width=a.width,
    rule=a.rule,
    max_steps=a.repetitions or (2 if fixed else 10),
    mu=a.mu or (5 if skips else 1),
    # Graves' 1 would skip two of three inputs from the start; 5 times the
    # sigmoid of -1.4 is about one repetition an input, and none skipped.
    halting_bias=-1.4 if skips else 1.0,
  )
  # Of a fixed number the cost is constant.
  c.loss = dict(ponder_weight=0.0 if fixed else a.tau)
  c.optimizer.update(
    name='adam', lr=a.lr, schedule='constant', warmup_steps=0.0
  )
  c.stages.stage1.steps = a.steps
  c.evals = dict(
    test=dict(type='classification', split='test', every_steps=1000)
  )
  c.checkpoint.update(every_steps=2000)
  c.log_every = 100
  return c
