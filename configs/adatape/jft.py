r"""Tables 1, 2 and 7: pre-training on JFT-300M, then few-shot accuracy.

  python -m launch.train --workdir=/tmp/jft_b32_input \
      --config=configs/adatape/jft.py:data=DIR,model=input,variant=B/32

Arguments: `data` is a folder of TFRecords (`dataset_lib.records.tfds`);
`fewshot` tfds or none: few-shot evaluation reads imagenet2012, cifar100 and
oxford_iiit_pet that TFDS prepared; `model` and `variant` of the ViT:

  Table 1  vit, u2t, uvit, learn, input    B/32, B/16, L/32, L/16
  Table 2  input with an ablation          B/32, B/16, L/32, L/16
  Table 7  vit, 3ffn                       B/28, B/14
           learn                           B/32, B/16

3ffn is a ViT with three feed-forward networks per block: one for [CLS], one for
each half of the patches. `ablation`: adaptive (default), length (the top T
tokens of the bank, "w/o Ada Length"), content (T trainable tokens and no bank,
"w/o Ada Length&Content"), act (halting by ACT, A.4). The average sequence
length of Table 2 is the metric `tape_length` plus 49 (B/32, L/32) or 196 (B/16,
L/16) patches.

Recipe: "We follow Dosovitskiy et al. (2020) and train all models for 7 epochs"
(A.6). From appendix B, Table 3 of the ViT paper: Adam with weight decay 0.1,
batches of 4,096, 10,000 warm-up steps, linear decay, no clipping of gradients
on JFT; the peak rate is 8e-4 (B), 6e-4 (L/32) or 4e-4 (L/16). Labels are
several per image, so the loss is a sigmoid. The weight of the ponder cost of
U2T and UViT is not printed; 0.01 here.

Figures 5 to 9 are sweeps, where a line sets another value of one field:

  python -m launch.sweep --workdir=/tmp/figure7 --metric=imagenet/10shot \
      --overrides=configs/adatape/figure7.txt \
      --config=configs/adatape/jft.py:data=DIR,model=learn,variant=B/32

figure5.txt is for model=vit,variant=S/32, figure8.txt for model=vit,
variant=B/32, figure6.txt (T = 5, 10, 20, 40) for model=input,ablation=length.
Figure 9 shows the runs of Table 1 and Figure 8 over the throughput of
`benchmarks.cost --table=1,7`. No result: JFT-300M is not public.
"""

import ml_collections

from configs import common
from configs.adatape import models

MODELS = ('vit', 'u2t', 'uvit', '3ffn', *models.TAPES)
TASKS = {
  'train_lib.classification:Classification': 'train_lib.multi_label:MultiLabel',
  'adatape.task:TapeClassification': 'adatape.task:TapeMultiLabel',
  'adatape.task:PonderClassification': 'adatape.task:PonderMultiLabel',
}
FEW_SHOT: dict[str, tuple[str, dict]] = {
  'imagenet': ('imagenet2012', dict(test_split='validation', shots=(10, 25))),
  'cifar100': ('cifar100', dict(test_split='test', shots=(10,))),
  'pets': ('oxford_iiit_pet', dict(test_split='test', shots=(10,))),
}


def get_config(arg=''):
  arg = common.parse_arg(
    arg, data='', model=MODELS, variant='B/32', fewshot=('tfds', 'none'),
    ablation=tuple(models.ABLATIONS),
  )  # fmt: skip
  c = ml_collections.ConfigDict()
  c.batch_size = 4096
  c.dataset = dict(
    name='records', directory=arg.data, num_classes=18_291, image_size=224,
    augment=('inception_crop', 'flip'),
  )  # fmt: skip
  c.loss = dict()
  models.paper(c, arg.model, arg.variant)
  c.task = TASKS[c.task]
  if arg.model in models.TAPES:
    c.model.tape_mlp = 'glu'
  models.ablate(c, arg.model, arg.ablation)
  large = {'L/32': 6e-4, 'L/16': 4e-4}
  c.optimizer = dict(
    name='adamw', lr=large.get(arg.variant, 8e-4), schedule='linear',
    warmup_steps=10_000, weight_decay=0.1, clip_norm=0.0,
  )  # fmt: skip
  c.phases = (dict(epochs=7),)
  c.evals = dict(
    val=dict(type='classification', split='validation', every_steps=10_000)
  )
  for name, (builder, fields) in FEW_SHOT.items():
    if arg.fewshot == 'tfds':
      data = dict(name='tfds', builder=builder, image_size=224)
      c.evals[name] = dict(type='fewshot', dataset=data, **fields)
  c.checkpoint = dict(every_steps=5000)
  c.log_every = 100
  return c
