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

The tape is that of Table 4, its tokens share the feed-forward networks of the
others as in Table 6; learning rate, cosine decay, betas and weight decay of
AdamW are those of Table 5, as table6.py reads them. Its 300 epochs, batch of
1,024 rows and 10,000 warm-up steps are shortened; no mixup, RandAug or label
smoothing.

Result: Caltech-101 photographs (100 classes of 25-30 images), size=64, batch
64, 8 epochs, model.depth=6, seed 0: learn 12.0 %, input 11.5 %, vit 13.6 %
(141 s on one CPU core). ImageNet and JFT were not run.
"""

from typing import Any

import ml_collections

from configs import common

TAPES = ('learn', 'input')
_CLASSIFY = 'train_lib.classification:Classification'
_PONDER = 'adatape.task:PonderClassification'
# Task and model of each baseline (section 3.1).
BASELINES = {
  'vit': (_CLASSIFY, dict(name='model_lib.vit:ViT')),
  'plainvit': (
    _CLASSIFY,
    dict(name='model_lib.vit:ViT', pool='gap', positions='sincos2d'),
  ),
  'deit': ('adatape.deit:Distillation', dict(name='adatape.deit:DeiT')),
  'ut': (_PONDER, dict(name='adatape.universal:UniversalViT')),
  'u2t': (_PONDER, dict(name='adatape.universal:UnsharedViT')),
  'uvit': (_PONDER, dict(name='adatape.universal:UViT')),
  'avit': ('adatape.avit:AViTClassification', dict(name='adatape.avit:AViT')),
  'ponder': (
    'adatape.ponder_vit:PonderNetClassification',
    dict(name='adatape.ponder_vit:PonderViT'),
  ),
  '3ffn': (_CLASSIFY, dict(name='adatape.vit_3ffn:ViT3FFN')),
}
MODELS = (*TAPES, *(name for name in BASELINES if name != '3ffn'))
# Of AdaTape: in Table 2, and the argument of appendix A.4.
ABLATIONS = ('adaptive', 'length', 'content', 'act')


def get_config(arg=''):
  arg = common.parse_arg(
    arg, root='', tfds='', model=MODELS, variant='Ti/16',
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
  paper_model(c, arg.model, arg.variant)
  lr, decay = 1e-3, 8e-5 if arg.variant[:2] in ('S/', 'B/') else 1e-4
  c.optimizer = dict(lr=lr, warmup_steps=0.1, weight_decay=decay / lr)
  c.stages = dict(stage1=dict(epochs=60))
  c.evals = dict(
    test=dict(type='classification', split='test', every_steps=500)
  )
  c.checkpoint = dict(every_steps=500)
  return c


def paper_model(c, model, variant):
  """Sets task, model and loss as the paper has them (Table 4, section 3.1)."""
  is_large = variant.startswith('L/')
  is_small = variant.startswith(('Ti/', 'S/'))
  if model in TAPES:
    large_input = is_large and model == 'input'
    image_model(
      c,
      model,
      dict(variant=variant),
      max_steps=10,
      threshold=1.0 if large_input else 2.0,
      tokens_per_step=10 if large_input else 5,
      bank=10_000 if model == 'learn' else 8,
    )
    return
  depth = 24 if is_large else 12
  # Limits of the depth; U2T's follow from the parameters and FLOPs printed in
  # Tables 1 and 6.
  fields: dict[str, dict[str, Any]] = {
    'ut': dict(max_steps=depth),
    'ponder': dict(max_steps=depth),
    'u2t': dict(max_steps=depth + (1 if is_small else 3)),
    'uvit': dict(ut_steps=6 if is_large else 3),
    # Of the authors' code: 10 * x[0] - 30 (Ti) or - 75 (S).
    'avit': dict(beta=-30.0 if variant.startswith('Ti/') else -75.0),
  }
  image_model(c, model, dict(variant=variant, **fields.get(model, {})))


def image_model(c, model, size, bank=0, **tape):
  """Sets task, model, tape loss; Table 4 has no loss for a learnable bank.

  `bank` is the number of tokens of a learnable bank, or the size of the finer
  patches of the input. Noise and drop (A.7) are for the learnable bank only;
  with an input bank there is no [CLS] token (Table 2 prints 59 = 49 + 10).
  """
  if model in BASELINES:
    c.task, fields = BASELINES[model]
    c.model = dict(**fields, **size)
    if c.task == _PONDER:
      c.loss.ponder_weight = 0.01  # the paper does not print it
    return
  c.task = 'adatape.task:TapeClassification'
  c.model = dict(name='adatape.model:AdaTapeViT', **size, **tape)
  if model == 'learn':
    c.model.update(
      bank='learnable', bank_size=bank, query_noise=0.01, bank_drop=0.1
    )
    c.loss.tape_weight = 0.0
  else:
    c.model.update(
      bank='input', bank_patch_size=bank, query_noise=0.0, bank_drop=0.0,
      pool='gap',
    )  # fmt: skip
    c.loss.tape_weight = 0.01


def ablate(c, ablation):
  """Fixes the length of the tape, or length and content; see `ABLATIONS`.

  A fixed length has no loss for longer tapes. 'act' halts by ACT instead: its
  trained scores weight the tokens, which LayerNorm undoes. There is no network
  between the two.
  """
  if ablation == 'adaptive':
    return
  has_tape = c.model.get('bank') is not None
  expected = 'adaptive unless the model is an AdaTape'
  common.expect(has_tape, 'ablation', expected, ablation)
  c.loss.tape_weight = 0.0
  if ablation in ('length', 'act'):
    c.model.fixed_length = True
  if ablation == 'act':
    c.model.update(act=True, read_mlp='')
  elif ablation == 'content':
    c.model.bank = 'none'
