r"""Sudoku and mazes by a small network that is applied until they are solved.

  python -m launch.train --workdir=/tmp/sudoku \
      --config=configs/looped/puzzles.py

Arguments after a colon:

  puzzle  sudoku6 (6x6, boxes of 2x3; default), sudoku4, sudoku9, or maze
  train   unrolled: the gradient goes through all iterations (default);
          carried: one iteration a step, a row stays until it halts (TRM)

Puzzles are made from a seed and an index, without files; no puzzle of the test
split is symmetric to one of training. `model.limit` is the number of iterations
in evaluation, and `model.rule` stops a served one. Results: docs/looped.md.
"""

import ml_collections

from configs import common

SUDOKU = 'looped.sudoku:Sudoku'
PUZZLES = {  # and the token of cells to fill in
  'sudoku6': (dict(name=SUDOKU, rows=2, columns=3, drafts=4), 1),
  'sudoku4': (dict(name=SUDOKU, rows=2, columns=2), 1),
  'sudoku9': (dict(name=SUDOKU, rows=3, columns=3), 1),
  'maze': (dict(name='looped.maze:Maze', side=11), 2),
}


def get_config(arg=''):
  a = common.parse_arg(
    arg, puzzle=tuple(PUZZLES), train=('unrolled', 'carried')
  )
  c = ml_collections.ConfigDict()

  puzzle, blank = PUZZLES[a.puzzle]
  c.dataset = dict(name='looped.data:Generated', puzzle=puzzle)
  c.batch_size = 128

  c.model = dict(
    name='looped.model:LoopedModel', width=64, num_heads=4, depth=2,
    max_steps=8, limit=16, blank=blank, score_reads='answer',
    rule=dict(name='looped.rules:Score'),
  )  # fmt: skip
  c.loss = dict(halting_weight=0.5)
  c.task = 'looped.task:Unrolled'
  if a.train == 'carried':
    c.task = 'looped.task:Carried'
    c.loss.exploration = 0.1

  c.optimizer = dict(
    name='adamw', lr=2e-3, b2=0.95, weight_decay=0.1, schedule='cosine',
    warmup_steps=0.05, end_lr=2e-5,
  )  # fmt: skip
  c.ema_decay = 0.999
  c.phases = (dict(steps=3000),)

  c.evals = dict(
    test=dict(type='classification', split='test', every_steps=500),
    stops=dict(type='looped.stops:Evaluator', split='test'),
    certificate=dict(type='looped.certificate:Evaluator'),
  )
  c.checkpoint = dict(every_steps=500)
  c.log_every = 50
  return c
