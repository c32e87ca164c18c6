r"""WNLI: is the pronoun replaced rightly?

  python -m launch.train --workdir=/tmp/wnli \
      --config=configs/eat/wnli.py:model=dense,pretrained=DIR,data=DIR
  python -m launch.train --workdir=/tmp/wnli_eat \
      --config=configs/eat/wnli.py:teacher=/tmp/wnli,data=DIR

Arguments: see `configs.eat.common`.
"""

from configs.eat import common


def get_config(arg=''):
  return common.fine_tuning(
    arg, 'wnli', lr=2e-5, max_length=128, shares_texts=True
  )
