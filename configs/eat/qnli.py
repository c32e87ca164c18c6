r"""QNLI: does a sentence answer a question?

  python -m launch.train --workdir=/tmp/qnli \
      --config=configs/eat/qnli.py:model=dense,pretrained=DIR,data=DIR
  python -m launch.train --workdir=/tmp/qnli_eat \
      --config=configs/eat/qnli.py:teacher=/tmp/qnli,data=DIR

Arguments: see `configs.eat.common`.
"""

from configs.eat import common


def get_config(arg=''):
  return common.fine_tuning(
    arg, 'qnli', lr=2e-5, max_length=256, shares_texts=True
  )
