r"""AdaTape-ViT on scikit-learn's handwritten digits: real images, no download.

1,797 images of 8 x 8 pixels, shown at 16 x 16; a fifth of every class is the
test split.

  python -m launch.train --config=configs/adatape/digits.py \
      --workdir=/tmp/digits
  python -m launch.evaluate --workdir=/tmp/digits --evals=fewshot

Arguments: `model` learn (learnable bank), input (bank of finer patches) or vit
(no tape), `epochs`, `seed`.

Result (test accuracy, seed 0, 2 CPU cores): learn 98.1 % in 79 s and vit 98.1 %
in 59 s (60 epochs), input 96.9 % in 113 s (80 epochs).
"""

from configs import common


def get_config(arg=''):
  arg = common.parse_arg(
    arg, model=('learn', 'input', 'vit'), epochs=80, seed=0
  )
  c = common.base()
  c.seed = arg.seed
  c.batch_size = 128
  c.dataset = dict(
    name='digits',
    image_size=16,
    augment=('inception_crop',),
    min_crop_area=0.6,
  )
  size = dict(width=64, depth=4, mlp_dim=128, num_heads=4, patch_size=4)
  common.image_model(c, arg.model, size, bank_size=256, bank_patch_size=2)
  if arg.model != 'vit':
    c.model.update(max_steps=6, threshold=2.0, tokens_per_step=3, query_dim=32)
  c.optimizer.update(lr=2e-3, warmup_steps=0.1, weight_decay=0.01)
  c.loss.label_smoothing = 0.1
  c.stages.stage1.epochs = float(arg.epochs)
  c.evals = dict(
    test=dict(type='classification', split='test', every_steps=220)
  )
  c.checkpoint.update(every_steps=220)
  c.log_every = 55
  return c.lock()
