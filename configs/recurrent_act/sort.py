r"""The order of real numbers (Graves 2016, section 3.4).

  python -m launch.train --config=configs/recurrent_act/sort.py \
      --workdir=/tmp/sort_act

Arguments: see `configs.recurrent_act.common`. LSTM of 512, batch 16.
"""

from configs.recurrent_act import common


def get_config(arg=''):
  c = common.experiment(
    arg, 'sort', cells=('lstm', 'gru', 'rnn'), width=512, batch=16,
    steps=200_000,
  )  # fmt: skip
  return c.lock()
