r"""Parity among letters: the quick start.

  python -m launch.train --config=configs/adatape/quick_start.py \
      --workdir=/tmp/quick_start
"""

import ml_collections

from configs import common


def get_config(arg=''):
  common.parse_arg(arg)  # takes none
  n, letters = 16, 26
  c = ml_collections.ConfigDict()
  c.task = 'adatape.task:TapeClassification'
  c.batch_size = 128
  c.dataset = dict(name='parity', length=n, letters=letters)
  c.model = dict(
    name='adatape.parity:ParityModel', tokens_per_step=2, max_steps=n // 2,
    threshold=n / 4, query_dim=16, norm_scale=0.5, depth=2, width=32,
    mlp_dim=64, num_heads=4, vocab_size=3 + letters,
  )  # fmt: skip
  c.optimizer = dict(name='adam', lr=1e-3, schedule='cosine', warmup_steps=100)
  knobs = dict(tape_weight=('linear', 0.01, 0.5))
  c.stages = dict(stage1=dict(steps=6000, knobs=knobs))
  c.evals = dict(
    test=dict(type='classification', split='test', every_steps=1000),
    difficulty=dict(type='adatape.difficulty:Evaluator'),
  )
  c.checkpoint = dict(every_steps=1000)
  return c
