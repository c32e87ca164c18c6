r"""AdaTape-ViT on any folder of images, root/split/class/*.jpg.

No preparation step: the classes are the names of the folders.

  python -m launch.train --workdir=/tmp/caltech101 \
      --config=configs/adatape/image_folder.py:root=/data/caltech101,size=96

Arguments: `root` the folder, `model` learn, input or vit, `variant` of the ViT
(Ti, S, B, L with a patch size), `size` of the images in pixels, `bank_patch`
of the input bank, `epochs`, `batch`, `seed`. AdaTape's own settings are those
of Table 4, the optimizer's those of Table 5.

Result: Caltech-101 photographs (100 classes of 25-30 images), size=64,
batch=64, epochs=8, model.depth=6, seed 0, 2 CPU cores: learn 12.2 % in 191 s,
input 13.1 % in 162 s, vit 12.3 % in 105 s. ImageNet and JFT were not run.
"""

from configs import common


def get_config(arg=''):
  arg = common.parse_arg(
    arg,
    root='',
    model=('learn', 'input', 'vit'),
    variant='Ti/16',
    size=224,
    bank_patch=8,
    epochs=60,
    batch=128,
    seed=0,
  )
  if not arg.root:
    raise ValueError('config argument root: expected a folder of images')
  c = common.base()
  c.seed = arg.seed
  c.batch_size = arg.batch
  c.dataset = dict(
    name='folder',
    root=arg.root,
    image_size=arg.size,
    augment=('inception_crop', 'flip'),
  )
  common.image_model(
    c,
    arg.model,
    dict(variant=arg.variant),
    bank_size=10_000,
    bank_patch_size=arg.bank_patch,
  )
  c.optimizer.update(lr=1e-3, warmup_steps=0.1, weight_decay=1e-4)
  c.stages.stage1.epochs = float(arg.epochs)
  c.evals = dict(
    test=dict(type='classification', split='test', every_steps=500)
  )
  c.checkpoint.update(every_steps=500)
  return c.lock()
