r"""Running sums of decimal numbers (Graves 2016, section 3.3).

  python -m launch.train --config=configs/recurrent_act/addition.py \
      --workdir=/tmp/addition_act

Arguments: see `configs.recurrent_act.common`, and `digits`, most digits of a
number (0: 5). LSTM of 512, batch 32.
"""

from configs.recurrent_act import common


def get_config(arg=''):
  c = common.experiment(
    arg, 'addition', cells=('lstm', 'gru', 'rnn'), digits=0, width=512,
    steps=200_000,
  )  # fmt: skip
  # Digits of the largest sum.
  most = 10 ** (c.dataset.digits or 5) - 1
  c.model.num_targets = len(str((c.dataset.length or 5) * most))
  return c.lock()
