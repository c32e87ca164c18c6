r"""Parity of a vector: is the number of 1s odd? (Graves 2016, section 3.1).

  python -m launch.train --config=configs/recurrent_act/parity.py \
      --workdir=/tmp/parity_act

Arguments: see `configs.recurrent_act.common`, and `placement`: leading numbers
(default) as in the code of Fojo's thesis, or scattered ones as in the paper.
RNN of 128 tanh units, batch 128. docs/measured.md says what it gives.
"""

from configs.recurrent_act import common


def get_config(arg=''):
  c = common.experiment(
    arg,
    'parity',
    cells=('rnn', 'gru', 'lstm'),
    placement=('leading', 'scattered'),
    batch=128,
    lr=3e-3,
    steps=60_000,
  )
  return c.lock()
