r"""Running sums of decimal numbers (Graves 2016, section 3.3).

  python -m launch.train --config=configs/recurrent_act/addition.py \
      --workdir=/tmp/addition_act

Arguments: see `configs.recurrent_act.common`, and `digits`, most digits of a
number, and `length`, numbers in a sequence. LSTM of 512, batch 32.
"""

from configs import common
from configs.recurrent_act.common import RULES, experiment, ponder_model


def get_config(arg=''):
  a = common.parse_arg(
    arg, rule=RULES, cell=('lstm', 'gru', 'rnn'), digits=5, length=5
  )
  c = experiment(a.rule, batch_size=32, steps=200_000)
  c.dataset = dict(
    name='recurrent_act.data:Graves',
    task='addition',
    length=a.length,
    digits=a.digits,
  )
  # Digits of the largest sum.
  num_targets = len(str(a.length * (10**a.digits - 1)))
  c.model = ponder_model(
    a.rule, cell=a.cell, width=512, num_targets=num_targets
  )
  return c
