r"""Parity of few marked inputs among many that can be skipped.

  python -m launch.train --workdir=/tmp/sparse_parity \
      --config=configs/recurrent_act/sparse_parity.py

Each marked input announces how many unmarked ones follow; Skip-ACT can learn
to spend nothing on those. `test/skipped_marked` and `test/skipped_unmarked`
are the shares of both kinds that it skips.

Arguments: see `configs.recurrent_act.common`; the rule is skip by default.
`dataset.max_gap` is the most unmarked inputs in a row. GRU of 64, batch 32.
"""

from configs import common
from configs.recurrent_act.common import experiment, ponder_model


def get_config(arg=''):
  a = common.parse_arg(
    arg,
    rule=('skip', 'act', 'straight_through', 'fixed'),
    cell=('gru', 'lstm', 'rnn'),
  )
  c = experiment(a.rule, batch_size=32, steps=10_000, tau=1e-2, lr=3e-3)
  c.dataset = dict(
    name='recurrent_act.data:Graves', task='sparse_parity', length=20, max_gap=3
  )
  c.model = ponder_model(
    a.rule, cell=a.cell, width=64, num_targets=1, max_steps=2
  )
  c.optimizer.schedule = 'cosine'
  # Skipping does not help to learn what has to be read.
  rising = dict(ponder_weight=('linear', 0.0, c.loss.ponder_weight))
  c.stages = dict(
    stage1_read=dict(steps=5000, knobs=dict(ponder_weight=0.0)),
    stage2_skip=dict(steps=5000, knobs=rising),
  )
  return c
