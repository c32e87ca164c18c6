r"""Models of the paper from scratch on photographs, under one recipe.

  python -m launch.train --workdir=/tmp/input \
      --config=configs/adatape/photographs.py:root=DIR,model=input

  python -m launch.sweep --workdir=/tmp/photographs --metric=test/accuracy \
      --overrides=configs/adatape/photographs.txt \
      --config=configs/adatape/photographs.py:root=DIR,fewshot=DIR

Arguments: `root` is a folder split/class/*.jpg to train on; `fewshot`, if
given, is one for few-shot evaluation; `model` as in images.py; `ablation` of
learn or input as in jft.py.

A small variant, to run on a CPU: 6 blocks of width 64 on images of 32 pixels,
16 patches of 8 pixels; the bank has 64 patches of 4 pixels, or 1,000 trainable
tokens. The tape is that of Table 4. All models take the same steps.
"""

import ml_collections

from configs import common
from configs.adatape import models

# Depth, or its limit in proportion to that of the paper's base models; bank.
SIZES: dict[str, dict] = {
  'learn': dict(depth=6, query_dim=64, bank_size=1000),
  'input': dict(depth=6, query_dim=64, bank_patch_size=4),
  'ut': dict(max_steps=6),
  'u2t': dict(max_steps=8),
  'uvit': dict(depth=6, ut_steps=2),
  'ponder': dict(max_steps=6),
  # Scores of about 1/6 at the start: the authors' gate is for trained weights.
  'avit': dict(depth=6, gamma=5.0, beta=-1.6),
}


def get_config(arg=''):
  arg = common.parse_arg(
    arg, root='', fewshot='', model=models.NAMES,
    ablation=tuple(models.ABLATIONS),
  )  # fmt: skip
  c = ml_collections.ConfigDict()
  c.batch_size = 64
  c.dataset = dict(
    name='folder', root=arg.root, image_size=32, resize_small=32,
    min_crop_area=0.3, augment=('inception_crop', 'flip'),
  )  # fmt: skip
  c.loss = dict(label_smoothing=0.1)
  size = SIZES.get(arg.model, dict(depth=6))
  models.build(
    c, arg.model, width=64, mlp_dim=256, num_heads=4, patch_size=8, **size
  )
  if arg.model == 'avit':
    c.loss.prior_depth = 4.5  # of 6, as 9 of 12
  models.ablate(c, arg.model, arg.ablation)
  c.optimizer = dict(lr=1e-3, warmup_steps=200, weight_decay=1e-4)
  c.phases = (dict(steps=2000),)
  c.evals = dict(test=dict(type='classification', split='test'))
  if arg.fewshot:
    data = dict(name='folder', root=arg.fewshot, image_size=32)
    c.evals.fewshot = dict(type='fewshot', dataset=data, shots=(5, 10))
  c.checkpoint = dict(every_steps=500)
  return c
