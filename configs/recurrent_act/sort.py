r"""The order of real numbers (Graves 2016, section 3.4).

  python -m launch.train --config=configs/recurrent_act/sort.py \
      --workdir=/tmp/sort_act

Arguments: see `configs.recurrent_act.common`. LSTM of 512, batch 16.
"""

from configs import common
from configs.recurrent_act.common import RULES, experiment, ponder_model


def get_config(arg=''):
  a = common.parse_arg(arg, rule=RULES, cell=('lstm', 'gru', 'rnn'))
  c = experiment(a.rule, batch_size=16, steps=200_000)
  c.dataset = dict(name='recurrent_act.data:Graves', task='sort', length=15)
  c.model = ponder_model(a.rule, cell=a.cell, width=512, num_targets=1)
  return c
