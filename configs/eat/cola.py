r"""CoLA: is a sentence acceptable English?

  python -m launch.train --workdir=/tmp/cola \
      --config=configs/eat/cola.py:model=dense,pretrained=DIR,data=DIR
  python -m launch.train --workdir=/tmp/cola_eat \
      --config=configs/eat/cola.py:teacher=/tmp/cola,data=DIR

Arguments: see `configs.eat.common`.
"""

from configs.eat import common


def get_config(arg=''):
  return common.fine_tuning(arg, 'cola', lr=2e-5, max_length=128)
