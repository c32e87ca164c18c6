r"""Chains of binary gates (Graves 2016, section 3.2).

  python -m launch.train --config=configs/recurrent_act/logic.py \
      --workdir=/tmp/logic_act

Arguments: see `configs.recurrent_act.common`, and `gates`, most gates in a
vector (0: 10). LSTM of 128, batch 16.
"""

from configs.recurrent_act import common


def get_config(arg=''):
  c = common.experiment(
    arg, 'logic', cells=('lstm', 'gru', 'rnn'), gates=0, batch=16, steps=100_000
  )
  return c.lock()
