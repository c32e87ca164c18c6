r"""Parity of a vector: is the number of 1s odd? (Graves 2016, section 3.1).

  python -m launch.train --config=configs/recurrent_act/parity.py \
      --workdir=/tmp/parity_act

Arguments: see `configs.recurrent_act.common`. RNN of 128 tanh units, batch 128.
`dataset.placement` is leading as in the code of Fojo's thesis; in the paper the
numbers are scattered. Results: docs/recurrent_act.md.
"""

from configs import common
from configs.recurrent_act.common import RULES, experiment, ponder_model


def get_config(arg=''):
  a = common.parse_arg(arg, rule=RULES, cell=('rnn', 'gru', 'lstm'))
  c = experiment(a.rule, batch_size=128, steps=60_000, lr=3e-3)
  c.dataset = dict(
    name='recurrent_act.data:Graves',
    task='parity',
    length=64,
    placement='leading',
  )
  c.model = ponder_model(a.rule, cell=a.cell, width=128, num_targets=1)
  return c
