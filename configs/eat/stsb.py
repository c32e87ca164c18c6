r"""STS-B: how alike are two sentences, from 0 to 5? A regression.

  python -m launch.train --workdir=/tmp/stsb \
      --config=configs/eat/stsb.py:model=dense,pretrained=DIR,data=DIR
  python -m launch.train --workdir=/tmp/stsb_eat \
      --config=configs/eat/stsb.py:teacher=/tmp/stsb,data=DIR

A row exits where two consecutive heads agree, so there are exits at 3 and 4,
or at their like in a model of 4 layers or fewer. Arguments: see
`configs.eat.common`.
"""

from configs.eat import common


def get_config(arg=''):
  return common.fine_tuning(arg, 'stsb', lr=2e-5, max_length=128, num_exits=2)
