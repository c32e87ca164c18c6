r"""ViT on ImageNet-1K from scratch, without tricks (Beyer et al., 2022).

  python -m launch.train --workdir=/tmp/vit_s16 \
      --config=configs/vit/imagenet.py:root=/data/imagenet

"Better plain ViT baselines for ImageNet-1k": mean pooling, sine positions,
RandAugment and mixup, batches of 1,024, 90 epochs; the paper's S/16 reaches
76.5 % (80.0 % after 300 epochs). Not run here.

Arguments: `root` is a folder root/{train,val}/class/*, or else TFDS has
prepared imagenet2012; `variant` S/16 or another (Ti/16, B/16, S/32, ...). A ViT
that prunes 30 % of the patches after each of three layers:

  python -m launch.train --workdir=/tmp/vit_s16_pruned \
      --config=configs/vit/imagenet.py:root=/data/imagenet \
      --config.model.prune_layers=3,6,9 \
      --config.model.prune_ratios=0.3,0.3,0.3
"""

import ml_collections

from configs import common


def get_config(arg=''):
  a = common.parse_arg(arg, root='', variant='S/16')
  c = ml_collections.ConfigDict()

  c.task = 'train_lib.classification:Classification'
  c.model = dict(
    name='model_lib.vit:ViT', variant=a.variant, pool='gap',
    positions='sincos2d',
  )  # fmt: skip
  c.loss = dict(mixup=0.2, label_smoothing=0.0)

  c.dataset = common.images(
    a.root, 'imagenet2012', image_size=224,
    augment=('inception_crop', 'flip', 'randaugment'), randaugment=(2, 10),
  )  # fmt: skip
  c.batch_size = 1024
  c.dtype = 'bfloat16'  # of the computation

  c.phases = (dict(epochs=90),)
  # Weight decay is 1e-4 of a weight at the peak rate.
  c.optimizer = dict(
    name='adamw', lr=1e-3, weight_decay=0.1, schedule='cosine',
    warmup_steps=10_000, clip_norm=1.0,
  )  # fmt: skip

  test = 'val' if a.root else 'validation'
  c.evals = dict(test=dict(type='classification', split=test, every_steps=5000))
  c.checkpoint = dict(every_steps=1000)
  c.log_every = 50
  return c
