r"""QQP: do two questions ask the same?

  python -m launch.train --workdir=/tmp/qqp \
      --config=configs/eat/qqp.py:model=dense,pretrained=DIR,data=DIR
  python -m launch.train --workdir=/tmp/qqp_eat \
      --config=configs/eat/qqp.py:teacher=/tmp/qqp,data=DIR

Arguments: see `configs.eat.common`.
"""

from configs.eat import common


def get_config(arg=''):
  return common.fine_tuning(
    arg, 'qqp', lr=2e-5, max_length=256, shares_texts=True
  )
