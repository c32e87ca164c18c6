r"""QQP: do two questions ask the same?

  python -m launch.train --workdir=/tmp/qqp \
      --config=configs/eat/qqp.py:model=dense,pretrained=DIR,data=DIR
  python -m launch.train --workdir=/tmp/qqp_eat \
      --config=configs/eat/qqp.py:teacher=/tmp/qqp,data=DIR

Result (6-layer MiniLM, 9,497 rows, two epochs, F1 on dev): dense 84.0; EAT
without window 83.5, at confidence 0.8 too with 63 % of the FLOPs. See
docs/measured.md.

Arguments: see `configs.eat.common`.
"""

from configs.eat import common


def get_config(arg=''):
  return common.fine_tuning(
    arg, 'qqp', lr=2e-5, max_length=256, shares_texts=True
  )
