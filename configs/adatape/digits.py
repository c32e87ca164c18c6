r"""AdaTape-ViT on scikit-learn's 1,797 handwritten digits: no download.

  python -m launch.train --config=configs/adatape/digits.py \
      --workdir=/tmp/digits
  python -m launch.evaluate --workdir=/tmp/digits --evals=fewshot

Argument: `model` learn (learnable bank), input (bank of finer patches) or vit
(no tape). Results: docs/adatape.md.
"""

import ml_collections

from configs import common
from configs.adatape import models


def get_config(arg=''):
  arg = common.parse_arg(arg, model=('learn', 'input', 'vit'))
  c = ml_collections.ConfigDict()
  c.batch_size = 128
  c.dataset = dict(
    name='digits', image_size=16, augment=('inception_crop',), min_crop_area=0.6
  )
  c.loss = dict(label_smoothing=0.1)
  size = dict(width=64, depth=4, mlp_dim=128, num_heads=4, patch_size=4)
  tape = dict(max_steps=6, tokens_per_step=3, query_dim=32)
  banks = dict(learn=dict(bank_size=256), input=dict(bank_patch_size=2))
  if arg.model in banks:
    size |= tape | banks[arg.model]
  models.build(c, arg.model, **size)
  c.optimizer = dict(lr=2e-3, warmup_steps=0.1, weight_decay=0.01)
  c.phases = (dict(epochs=80),)
  c.evals = dict(
    test=dict(type='classification', split='test', every_steps=220)
  )
  c.checkpoint = dict(every_steps=220)
  c.log_every = 55
  return c
