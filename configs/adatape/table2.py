r"""Table 2: which adaptivity of AdaTape matters; also Figure 6.

  python -m launch.train --workdir=/tmp/jft_b32_fixed \
      --config=configs/adatape/table2.py:data=DIR,variant=B/32,ablation=length

Arguments: `data`, `variant` and `fewshot` as in table1.py; `ablation`:

  adaptive  AdaTape with an input bank, as in Table 1
  length    the top T tokens of the bank ("w/o Ada Length")
  content   T trainable tokens and no bank ("w/o Ada Length&Content")

The average sequence length of the table is the metric `tape_length` plus 49
(B/32, L/32) or 196 (B/16, L/16) patches. Figure 6 (T = 5, 10, 20, 40):

  python -m launch.sweep --workdir=/tmp/figure6 --metric=imagenet/10shot \
      --overrides=configs/adatape/figure6.txt \
      --config=configs/adatape/table2.py:data=DIR,variant=B/32,ablation=length

As in Table 1, input and tape tokens have separate feed-forward networks and
there is no [CLS] token.
No result: JFT-300M is not public.
"""

from configs import common
from configs.adatape import table1
from configs.adatape.images import ABLATIONS, ablate


def get_config(arg=''):
  arg = common.parse_arg(
    arg, data='', variant='B/32', fewshot=('tfds', 'none'), ablation=ABLATIONS
  )
  arg.model = 'input'
  c = table1.pretraining(arg)
  ablate(c, arg.ablation)
  return c
