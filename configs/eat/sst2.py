r"""SST-2: the sentiment of a sentence.

  python -m launch.train --workdir=/tmp/sst2 \
      --config=configs/eat/sst2.py:model=dense,pretrained=DIR,data=DIR
  python -m launch.train --workdir=/tmp/sst2_eat \
      --config=configs/eat/sst2.py:teacher=/tmp/sst2,data=DIR

Arguments: see `configs.eat.common`.
"""

from configs.eat import common


def get_config(arg=''):
  return common.fine_tuning(
    arg, 'sst2', lr=2e-5, max_length=256, shares_texts=True
  )
