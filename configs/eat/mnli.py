r"""MNLI: does a sentence follow from another?

  python -m launch.train --workdir=/tmp/mnli \
      --config=configs/eat/mnli.py:model=dense,pretrained=DIR,data=DIR
  python -m launch.train --workdir=/tmp/mnli_eat \
      --config=configs/eat/mnli.py:teacher=/tmp/mnli,data=DIR

Arguments: see `configs.eat.common`.
"""

from configs.eat import common


def get_config(arg=''):
  return common.fine_tuning(
    arg, 'mnli', lr=3e-5, max_length=320, shares_texts=True
  )
