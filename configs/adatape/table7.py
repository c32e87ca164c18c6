r"""Table 7: is AdaTape better because of its additional parameters?

  python -m launch.train --workdir=/tmp/jft_b28_3ffn \
      --config=configs/adatape/table7.py:data=DIR,model=3ffn,variant=B/28

Arguments: `data` and `fewshot` as in table1.py; `model` vit, 3ffn (a ViT with
three feed-forward networks per block: one for [CLS], one for each half of the
patches) or learn (AdaTape with a learnable bank); `variant` B/28 or B/14 for
the first two, B/32 or B/16 for AdaTape.

Input and tape tokens of AdaTape have separate feed-forward networks, which its
printed parameters count. The recipe is that of Table 1. No result: JFT-300M is
not public.
"""

from configs import common
from configs.adatape import table1

MODELS = ('vit', '3ffn', 'learn')


def get_config(arg=''):
  arg = common.parse_arg(
    arg, data='', model=MODELS, variant='B/28', fewshot=('tfds', 'none')
  )
  return table1.pretraining(arg)
