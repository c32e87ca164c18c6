r"""RTE: does a sentence follow from another?

  python -m launch.train --workdir=/tmp/rte \
      --config=configs/eat/rte.py:model=dense,pretrained=DIR,data=DIR
  python -m launch.train --workdir=/tmp/rte_eat \
      --config=configs/eat/rte.py:teacher=/tmp/rte,data=DIR

Arguments: see `configs.eat.common`.
"""

from configs.eat import common


def get_config(arg=''):
  return common.fine_tuning(arg, 'rte', lr=2e-5, max_length=256)
