r"""AdaTape-ViT on a folder of images, root/split/class/*.jpg, or a TFDS name.

No preparation step for a folder: the classes are the names of its folders. A
TFDS data set has to be prepared on this machine.

  python -m launch.train --workdir=/tmp/caltech101 \
      --config=configs/adatape/images.py:root=/data/caltech101,size=96
  python -m launch.train --workdir=/tmp/cifar10 \
      --config=configs/adatape/images.py:tfds=cifar10,size=32

Arguments: `root` the folder, or `tfds` the name; `variant` of the ViT (Ti, S,
B, L with a patch size); `size` of the images in pixels; `model`:

  learn, input         AdaTape with a learnable bank or a bank of finer patches
  vit, plainvit, deit  depth is fixed
  ut, u2t, uvit        Universal Transformer; without sharing; below a ViT
  avit, ponder         A-ViT; PonderNet on the Universal Transformer

The tape is that of Table 4, AdamW that of Table 5 as imagenet.py reads it. The
300 epochs, batch of 1,024 rows and 10,000 warm-up steps are shortened; no
mixup, RandAug or label smoothing.

docs/adatape.md has results on Caltech-101 (size=64, batch 64, 8 epochs,
model.depth=6, seed 0).
"""

import ml_collections

from configs import common
from configs.adatape import models


def get_config(arg=''):
  arg = common.parse_arg(
    arg, root='', tfds='', model=models.NAMES, variant='Ti/16', size=224
  )
  if bool(arg.root) == bool(arg.tfds):
    raise ValueError(
      'config argument root: expected a folder of images, or else '
      f'tfds=NAME, got root={arg.root!r} and tfds={arg.tfds!r}'
    )
  c = ml_collections.ConfigDict()
  c.batch_size = 128
  augment = 'inception_crop', 'flip'
  c.dataset = common.images(
    arg.root, arg.tfds, image_size=arg.size, augment=augment
  )
  c.loss = dict(label_smoothing=0.0)
  models.paper(c, arg.model, arg.variant)
  lr, decay = 1e-3, 8e-5 if arg.variant[:2] in ('S/', 'B/') else 1e-4
  c.optimizer = dict(lr=lr, warmup_steps=0.1, weight_decay=decay / lr)
  c.phases = (dict(epochs=60),)
  c.evals = dict(
    test=dict(type='classification', split='test', every_steps=500)
  )
  c.checkpoint = dict(every_steps=500)
  return c
