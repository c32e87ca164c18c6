r"""Images of one's own, by any model that reads images.

  python -m launch.train --workdir=/tmp/photos \
      --config=configs/images.py:data=DIR,model=learn,variant=Ti/16
  python -m launch.train --workdir=/tmp/photos_vit \
      --config=configs/images.py:data=DIR,model=vit,pretrained=DIR,finetune=1

Arguments:

  data        a folder of classes, DIR/cat/1.jpg, or a table of paths and labels
              (CSV, ...): 60 % are trained on, 20 % are 'validation', 20 % are
              'test'; or a folder of splits, DIR/train/cat/1.jpg with DIR/test
  path, label, group  columns of a table; paths are relative to its folder;
              rows of a group are in one of the splits that are made
  tfds        instead of data, a TFDS data set that this machine has prepared
  size        of the images in pixels; default: that of the checkpoint, or 224
  variant     of the ViT without a checkpoint: Ti, S, B or L with a patch size
  pretrained  a published ViT (.npz, .safetensors, a directory of timm or
              Hugging Face) or a run: its sizes and parameters, a fresh head
  finetune    1: the recipe of a pretrained model; 0: that of one from scratch
  certify     1: certifies a smaller halting threshold of an AdaTape, on 3/4 of
              the rows of 'validation'; a calibration is fitted to the others
  model       learn, input         AdaTape with a learnable bank or a bank of
                                   finer patches
              vit, plainvit, deit  depth is fixed
              ut, u2t, uvit        Universal Transformer; without sharing; below
                                   a ViT
              avit, ponder         A-ViT; PonderNet on the Universal Transformer

From scratch: the tape is that of Table 4 of AdaTape, AdamW that of Table 5 as
adatape/imagenet.py reads it. The 300 epochs, batch of 1,024 rows and 10,000
warm-up steps are shortened; no mixup, RandAug or label smoothing.
docs/adatape.md has results on Caltech-101 (size=64, batch 64, 8 epochs,
model.depth=6, seed 0).

Fine-tuning: a smaller rate, a fifth of the epochs, larger crops; each block
learns at 3/4 of the rate of the one above it, as BEiT is fine-tuned; head and
tape learn at the whole rate. Not measured with public weights.
"""

import pathlib

import ml_collections

from configs import common
from configs.adatape import models

# Whose encoder has the parameters of a ViT.
PRETRAINED = ('learn', 'input', 'vit', 'plainvit', 'deit', 'avit')


def get_config(arg=''):
  a = common.parse_arg(
    arg, data='', tfds='', model=models.NAMES, variant='', size=0,
    pretrained='', finetune=0, path='path', label='label', group='', certify=0,
  )  # fmt: skip
  is_one = bool(a.data) != bool(a.tfds)
  expected = 'a folder or table of images, or else tfds=NAME'
  got = f'data={a.data}, tfds={a.tfds}'
  common.expect(is_one, 'data', expected, got)
  size = a.size or (0 if a.pretrained else 224)
  c = ml_collections.ConfigDict()
  c.batch_size = 128
  augment = 'inception_crop', 'flip'
  columns = dict(path=a.path, label=a.label, group=a.group) if a.data else {}
  c.dataset = common.images(
    a.data, a.tfds, image_size=size, augment=augment, **columns
  )
  c.loss = dict(label_smoothing=0.0)
  variant = a.variant or 'Ti/16'
  models.paper(c, a.model, variant)
  lr, decay = 1e-3, 8e-5 if variant[:2] in ('S/', 'B/') else 1e-4
  c.optimizer = dict(lr=lr, warmup_steps=0.1, weight_decay=decay / lr)
  c.phases = (dict(epochs=60),)
  c.evals = dict(
    test=dict(type='classification', split='test', every_steps=500)
  )
  folder = pathlib.Path(a.data).expanduser() / 'train'
  if a.data and not any(path.is_dir() for path in folder.glob('*')):
    # Splits are made: `test` is evaluated once, at the end.
    c.evals.test.every_steps = 0
    c.evals.validation = dict(c.evals.test, split='validation', every_steps=0.2)
  if a.certify:
    needs = f'0, or 1 with one of {list(models.TAPES)} and splits that are made'
    is_legal = a.model in models.TAPES and 'validation' in c.evals
    common.expect(is_legal, 'certify', needs, a.certify)
    fitted, unseen = 'validation[:25%]', 'validation[25%:]'
    c.evals.calibration = dict(
      type='calibration', split=unseen, calibration_split=fitted
    )
    c.evals.certificate = dict(
      type='certificate', split=unseen, epsilon=0, cheaper=True
    )
  c.checkpoint = dict(every_steps=500)
  if a.pretrained:
    start_from(c, a)
  needs = 'a checkpoint as pretrained, or finetune=0'
  common.expect(a.pretrained or not a.finetune, 'finetune', needs, a.finetune)
  return c


def start_from(c, a):
  """Takes sizes and parameters of a checkpoint; with `finetune` a recipe."""
  legal = f'one of {list(PRETRAINED)} with pretrained'
  common.expect(a.model in PRETRAINED, 'model', legal, a.model)
  checkpoint_fields = {'variant', 'pool', 'positions'}
  kept = {name: c.model[name] for name in {*c.model} - checkpoint_fields}
  c.model = kept | dict(from_checkpoint=a.pretrained)
  skip = ('^(distillation_)?head/',)
  c.warm_start = dict(workdir=a.pretrained, skip=skip)
  if not a.finetune:
    return
  tape = ('tape->1.000000',) if a.model in models.TAPES else ()
  scales = *tape, 'layers->0.75'
  c.optimizer.update(lr=3e-4, weight_decay=0.05, scales=scales)
  c.phases = (dict(epochs=12, least_steps=500),)
  c.dataset.min_crop_area = 0.4
  c.batch_size = 64
