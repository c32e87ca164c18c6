r"""Chains of binary gates (Graves 2016, section 3.2).

  python -m launch.train --config=configs/recurrent_act/logic.py \
      --workdir=/tmp/logic_act

Arguments: see `configs.recurrent_act.common`. LSTM of 128, batch 16.
"""

from configs import common
from configs.recurrent_act.common import RULES, experiment, ponder_model


def get_config(arg=''):
  a = common.parse_arg(arg, rule=RULES, cell=('lstm', 'gru', 'rnn'))
  c = experiment(a.rule, batch_size=16, steps=100_000)
  c.dataset = dict(
    name='recurrent_act.data:Graves', task='logic', length=10, gates=10
  )
  c.model = ponder_model(a.rule, cell=a.cell, width=128, num_targets=1)
  return c
