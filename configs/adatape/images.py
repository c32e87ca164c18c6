r"""AdaTape-ViT on a folder of images, root/split/class/*.jpg, or a TFDS name.

No preparation step for a folder: the classes are the names of its folders. A
TFDS data set has to be prepared on this machine.

  python -m launch.train --workdir=/tmp/caltech101 \
      --config=configs/adatape/images.py:root=/data/caltech101,size=96
  python -m launch.train --workdir=/tmp/cifar10 \
      --config=configs/adatape/images.py:tfds=cifar10,size=32

Arguments: `root` the folder, or `tfds` the name; `model` learn, input or vit;
`variant` of the ViT (Ti, S, B, L with a patch size); `size` of the images in
pixels.

The tape is that of Table 4. Learning rate, cosine decay, AdamW's betas and
weight decay are those of Table 5. Epochs, batch and warm-up are for folders
much smaller than ImageNet (Table 5: 300 epochs of 1,024 rows, 10,000 steps of
warm-up); there is no mixup, no RandAug and no label smoothing.

Result: Caltech-101 photographs (100 classes of 25-30 images), size=64, batch
64, 8 epochs, model.depth=6, seed 0, 2 CPU cores: learn 12.2 % in 191 s, input
13.1 % in 162 s, vit 12.3 % in 105 s. ImageNet and JFT were not run.
"""

import ml_collections

from configs import common
from configs.adatape.common import image_model


def get_config(arg=''):
  arg = common.parse_arg(
    arg, root='', tfds='', model=('learn', 'input', 'vit'), variant='Ti/16',
    size=224,
  )  # fmt: skip
  if bool(arg.root) == bool(arg.tfds):
    raise ValueError(
      'config argument root: expected a folder of images, or else '
      f'tfds=NAME, got root={arg.root!r} and tfds={arg.tfds!r}'
    )
  c = ml_collections.ConfigDict()
  c.batch_size = 128
  c.dataset = dict(image_size=arg.size, augment=('inception_crop', 'flip'))
  if arg.root:
    c.dataset.update(name='folder', root=arg.root)
  else:
    c.dataset.update(name='tfds', builder=arg.tfds)
  c.loss = dict(label_smoothing=0.0)
  is_large = arg.variant.startswith('L/')
  image_model(
    c,
    arg.model,
    dict(variant=arg.variant),
    learn=dict(
      max_steps=10, threshold=2.0, tokens_per_step=5, bank_size=10_000
    ),
    finer=dict(
      max_steps=10,
      threshold=1.0 if is_large else 2.0,
      tokens_per_step=10 if is_large else 5,
      bank_patch_size=8,
    ),
  )
  c.optimizer = dict(
    name='adamw', lr=1e-3, schedule='cosine', warmup_steps=0.1,
    weight_decay=8e-5 if arg.variant[:2] in ('S/', 'B/') else 1e-4,
  )  # fmt: skip
  c.stages = dict(stage1=dict(epochs=60))
  c.evals = dict(
    test=dict(type='classification', split='test', every_steps=500)
  )
  c.checkpoint = dict(every_steps=500)
  return c
