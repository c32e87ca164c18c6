r"""SST-2: the sentiment of a sentence.

  python -m launch.train --workdir=/tmp/sst2 \
      --config=configs/eat/sst2.py:model=dense,pretrained=DIR,data=DIR
  python -m launch.train --workdir=/tmp/sst2_eat \
      --config=configs/eat/sst2.py:teacher=/tmp/sst2,data=DIR

Result (6-layer MiniLM, full data, dev): dense 90.5 %, ECE 3.2 %; EAT with exits
at 2, 3 and 4 89.8 % at full depth, 89.4 % at confidence 0.8 and 32 % of the
FLOPs; student of 3 layers 89.0 %. Recipes and times: docs/measured.md.

Arguments: see `configs.eat.common`.
"""

from configs.eat import common


def get_config(arg=''):
  return common.fine_tuning(
    arg, 'sst2', lr=2e-5, max_length=256, shares_texts=True
  )
