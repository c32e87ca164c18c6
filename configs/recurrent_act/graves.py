r"""Tasks of Graves (2016) by a recurrent cell that ponders, ACT or Skip-ACT.

  python -m launch.train --workdir=/tmp/parity_act \
      --config=configs/recurrent_act/graves.py:task=parity

Arguments:

  task  parity (is the number of 1s in a vector odd?, section 3.1), logic
        (chains of binary gates, 3.2), addition (running sums of decimals, 3.3),
        sort (the order of real numbers, 3.4), or sparse_parity: parity of the
        marked inputs; Skip-ACT can learn to skip the unmarked inputs
  rule  act (default), straight_through, skip (Skip-ACT, default of
        sparse_parity), or fixed: always `model.max_steps` repetitions of the
        cell, the baseline of Fojo's thesis
  cell  rnn, gru or lstm

`loss.ponder_weight` is tau (of sparse_parity also where the knob of phase 1
ends), `model.rule.mu` the largest score of Skip-ACT. Graves stops after 100
repetitions at an input, 20 in addition; here `model.max_steps` is 10 (2 for
rule=fixed and sparse_parity): masked repetitions cost time. Graves trains with
a learning rate of 1e-4 and 16 asynchronous workers, Fojo with 1e-3 and one;
gradients are clipped at norm 1, which neither states. `dataset.placement` of
parity is leading as in the code of Fojo's thesis; in the paper the numbers are
scattered. Results: docs/recurrent_act.md.
"""

import ml_collections

from configs import common

# Task: (cell, width, rows of a batch, steps, learning rate).
TASKS = {
  'parity': ('rnn', 128, 128, 60_000, 3e-3),
  'logic': ('lstm', 128, 16, 100_000, 1e-3),
  'addition': ('lstm', 512, 32, 200_000, 1e-3),
  'sort': ('lstm', 512, 16, 200_000, 1e-3),
  'sparse_parity': ('gru', 64, 32, 10_000, 3e-3),
}


def get_config(arg=''):
  a = common.parse_arg(
    arg, task=tuple(TASKS), cell=('', 'rnn', 'gru', 'lstm'),
    rule=('', 'act', 'straight_through', 'skip', 'fixed'),
  )  # fmt: skip
  is_sparse = a.task == 'sparse_parity'
  cell, width, batch_size, steps, lr = TASKS[a.task]
  rule = a.rule or ('skip' if is_sparse else 'act')
  c = ml_collections.ConfigDict()
  c.task = 'recurrent_act.task:SequenceTask'
  c.batch_size = batch_size
  c.dataset = dict(name='recurrent_act.data:Graves', task=a.task)
  if a.task == 'parity':
    c.dataset.placement = 'leading'
  c.model = dict(
    name='recurrent_act.model:RecurrentModel', cell=a.cell or cell, width=width,
    rule=common.rule(rule, **(dict(mu=5) if rule == 'skip' else {})),
    max_steps=2 if is_sparse or rule == 'fixed' else 10,
    # A bias of 1 (Graves) would skip two of three inputs from the start; 5
    # times the sigmoid of -1.4 is about one repetition an input, no skip.
    halting_bias=-1.4 if rule == 'skip' else 1.0,
  )  # fmt: skip
  # The cost of a fixed number of repetitions is constant.
  tau = 0.0 if rule == 'fixed' else 1e-2 if is_sparse else 1e-3
  c.loss = dict(ponder_weight=tau)
  c.optimizer = dict(name='adam', lr=lr, schedule='constant', warmup_steps=0)
  c.phases = (dict(steps=steps),)
  if is_sparse:
    c.optimizer.schedule = 'cosine'
    # First train without ponder cost: skipping does not help to learn parity.
    rising = dict(ponder_weight=('linear', 0.0, tau))
    c.phases = (
      dict(name='read', steps=steps // 2, knobs=dict(ponder_weight=0.0)),
      dict(name='skip', steps=steps // 2, knobs=rising),
    )
  c.evals = dict(
    test=dict(type='classification', split='test', every_steps=1000)
  )
  c.checkpoint = dict(every_steps=2000)
  c.log_every = 100
  return c
