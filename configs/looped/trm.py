r"""TRM on Sudoku-Extreme, as published; not run here.

  python -m launch.train --workdir=/tmp/trm \
      --config=configs/looped/trm.py:data=/data/sudoku-extreme

"Less is More: Recursive Reasoning with Tiny Networks" (Jolicoeur-Martineau
2025, arXiv 2510.04871): 1,000 puzzles, augmented, 87.4 % of the test puzzles
with mix=cells (5.0 million parameters), 74.7 % with mix=attention (6.8
million). `data` has train.csv and test.csv with the columns source, question,
answer, rating. The paper's batch is 768, and an update takes one iteration.
The EMA here is debiased, and there is no embedding of puzzle ids: Sudoku has
one id.
"""

import ml_collections

from configs import common


def get_config(arg=''):
  a = common.parse_arg(arg, data='', mix=('cells', 'attention'))
  c = ml_collections.ConfigDict()

  c.task = 'looped.task:Carried'
  c.model = dict(
    name='looped.model:LoopedModel', width=512, num_heads=8, depth=2,
    mix=a.mix, positions='rotary' if a.mix == 'attention' else 'none',
    prefix=16, latents=2, high_cycles=3, low_cycles=6, gradient='last',
    score_gradient='trunk', scores=2, max_steps=16,
  )  # fmt: skip
  c.loss = dict(probabilities='stablemax', halting_weight=0.5, exploration=0.1)
  c.dtype = 'bfloat16'

  c.dataset = dict(name='looped.files:SudokuCsv', path=a.data)
  c.train_split = 'train[:1000]'
  c.batch_size = 768
  c.phases = (dict(steps=65_104),)
  c.optimizer = dict(
    name='adam_atan2', lr=1e-4, b2=0.95, weight_decay=1.0, clip_norm=0.0,
    schedule='constant', warmup_steps=2000,
  )  # fmt: skip
  c.ema_decay = 0.999
  c.evals = dict(
    # All 422,786 would take longer than the training.
    test=dict(type='classification', split='test[:5000]', every_steps=5000)
  )
  c.checkpoint = dict(every_steps=1000)
  c.log_every = 50
  return c
