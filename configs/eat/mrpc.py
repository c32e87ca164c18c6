r"""MRPC: do two sentences say the same?

  python -m launch.train --workdir=/tmp/mrpc \
      --config=configs/eat/mrpc.py:model=dense,pretrained=DIR,data=DIR
  python -m launch.train --workdir=/tmp/mrpc_eat \
      --config=configs/eat/mrpc.py:teacher=/tmp/mrpc,data=DIR

Arguments: see `configs.eat.common`.
"""

from configs.eat import common


def get_config(arg=''):
  return common.fine_tuning(arg, 'mrpc', lr=2e-5, max_length=128)
