"""What the experiments of recurrent_act share: a pondering cell and Adam.

Arguments of every file beside this one:

  rule  act (default), straight_through, skip (Skip-ACT), or fixed: always
        `model.max_steps` repetitions of the cell, the baseline of Fojo's thesis
  cell  rnn, gru or lstm

`loss.ponder_weight` is tau. Graves (2016) stops after 100 repetitions at an
input, and after 20 in addition; here `model.max_steps` is 10, of rule fixed 2.
A training step takes the time of all of them, so a small limit is faster.
`model.mu` is the largest score of Skip-ACT.

Adam without decay or warm-up. Graves trains with a learning rate of 1e-4 and
16 asynchronous workers, Fojo with 1e-3 and one. Gradients are clipped at a
norm of 1 here, which neither says.
"""

from typing import Any

import ml_collections

RULES = ('act', 'straight_through', 'skip', 'fixed')


def ponder_model(rule: str, **fields: Any) -> dict[str, Any]:
  """Returns a pondering cell; see the module."""
  skips = rule == 'skip'
  return (
    dict(
      name='recurrent_act.model:RecurrentModel',
      rule=rule,
      mu=5 if skips else 1,
      # Graves' 1 would skip two of three inputs from the start; 5 times the
      # sigmoid of -1.4 is about one repetition an input, and none skipped.
      halting_bias=-1.4 if skips else 1.0,
    )
    | dict(max_steps=2 if rule == 'fixed' else 10)
    | fields
  )


def experiment(
  rule: str, batch_size: int, steps: int, tau: float = 1e-3, lr: float = 1e-3
) -> ml_collections.ConfigDict:
  """Returns a run without data and model."""
  c = ml_collections.ConfigDict()
  c.task = 'recurrent_act.task:SequenceTask'
  c.batch_size = batch_size
  # The cost of a fixed number of repetitions is constant.
  c.loss = dict(ponder_weight=0.0 if rule == 'fixed' else tau)
  c.optimizer = dict(name='adam', lr=lr, schedule='constant', warmup_steps=0)
  c.stages = dict(stage1=dict(steps=steps))
  c.evals = dict(
    test=dict(type='classification', split='test', every_steps=1000)
  )
  c.checkpoint = dict(every_steps=2000)
  c.log_every = 100
  return c
