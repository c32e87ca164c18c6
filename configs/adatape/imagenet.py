r"""Table 6: training on ImageNet-1K from scratch.

  python -m launch.train --workdir=/tmp/imagenet_s16 \
      --config=configs/adatape/imagenet.py:model=input,variant=S/16

Arguments: `model` input (AdaTape), vit, deit, plainvit, u2t or avit; `variant`
Ti/16, S/16 or B/16; `root` a folder root/{train,val}/class/*, or else TFDS has
prepared imagenet2012; `teacher` of deit, the directory of a run that its
distillation token imitates (none in the table).

Table 5 has the hyper-parameters of every model. Its weight decay is taken as in
the code of Beyer et al. (2022), whose recipe it repeats: the share by which a
step of peak learning rate reduces a weight, so ours is Table 5's over 0.001.
Gradients are clipped at norm 1, as there and in the ViT paper. The weights of
the ponder costs of U2T and A-ViT are not printed. The printed parameters of
AdaTape count a network that is applied to the tape's tokens once. No result: it
was not run.
"""

import ml_collections

from configs import common
from configs.adatape import models

MODELS = ('input', 'vit', 'deit', 'plainvit', 'u2t', 'avit')


def get_config(arg=''):
  arg = common.parse_arg(arg, model=MODELS, variant='S/16', root='', teacher='')
  is_legal = not arg.teacher or arg.model == 'deit'
  common.expect(is_legal, 'teacher', "'' unless model=deit", arg.teacher)
  is_tiny = arg.variant.startswith('Ti/')
  c = ml_collections.ConfigDict()
  c.batch_size = 1024
  c.dataset = common.images(
    arg.root, 'imagenet2012', image_size=224,
    augment=('inception_crop', 'flip', 'randaugment'),
    randaugment=(2, 10) if is_tiny else (2, 15),
  )  # fmt: skip
  c.loss = dict(
    label_smoothing=0.0 if is_tiny else 0.1, mixup=0.2 if is_tiny else 0.5
  )
  models.paper(c, arg.model, arg.variant)
  if arg.model == 'deit':
    c.loss.teacher = arg.teacher
  decay = 0.1 if is_tiny else 0.08
  c.optimizer = dict(lr=1e-3, warmup_steps=10_000, weight_decay=decay)
  c.phases = (dict(epochs=300),)
  split = 'val' if arg.root else 'validation'
  c.evals = dict(
    test=dict(type='classification', split=split, every_steps=5000)
  )
  c.checkpoint = dict(every_steps=5000)
  c.log_every = 100
  return c
