r"""Parity of few marked inputs among many that can be skipped.

  python -m launch.train --workdir=/tmp/sparse_parity \
      --config=configs/recurrent_act/sparse_parity.py

Each marked input announces how many unmarked ones follow; Skip-ACT can learn
to spend nothing on those. `test/skipped_marked` and `test/skipped_unmarked`
are the shares of both kinds that it skips.

Arguments: see `configs.recurrent_act.common`, and `max_gap`, most unmarked
inputs in a row (0: 3). GRU of 64, batch 32, rule skip.
"""

from configs.common import stage
from configs.recurrent_act import common


def get_config(arg=''):
  c = common.experiment(
    arg,
    'sparse_parity',
    cells=('gru', 'lstm', 'rnn'),
    rule=('skip', 'act', 'straight_through', 'fixed'),
    max_gap=0,
    width=64,
    tau=1e-2,
    repetitions=2,
    lr=3e-3,
    steps=10_000,
  )
  c.optimizer.schedule = 'cosine'
  steps, tau = c.stages.stage1.steps, c.loss.ponder_weight
  if steps < 2:
    raise ValueError(
      'config argument steps: expected at least 2, one for each stage, got '
      f'{steps}'
    )
  # Skipping does not help to learn what has to be read.
  c.stages = dict(
    stage1_read=stage(steps=steps // 2, knobs=dict(ponder_weight=0.0)),
    stage2_skip=stage(
      steps=steps - steps // 2,
      knobs=dict(ponder_weight=('linear', 0.0, tau)),
    ),
  )
  return c.lock()
