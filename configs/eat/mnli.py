r"""MNLI: does a sentence follow from another?

  python -m launch.train --workdir=/tmp/mnli \
      --config=configs/eat/mnli.py:model=dense,pretrained=DIR,data=DIR
  python -m launch.train --workdir=/tmp/mnli_eat \
      --config=configs/eat/mnli.py:teacher=/tmp/mnli,data=DIR

Result (6-layer MiniLM, 22,560 rows, one epoch, matched dev): dense 66.2 %; EAT
without window 66.7 %, and 66.9 % at confidence 0.5 with 60 % of the FLOPs. See
docs/measured.md.

Arguments: see `configs.eat.common`.
"""

from configs.eat import common


def get_config(arg=''):
  return common.fine_tuning(
    arg, 'mnli', lr=3e-5, max_length=320, shares_texts=True
  )
