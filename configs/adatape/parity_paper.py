r"""Parity at the size of the paper: Transformer-Tiny (Table 3 and Figure 2).

AdaTape, section 3.2 and appendix A.5: 12 layers, width 192 (printed as 196,
which 3 heads do not divide), MLP 768, 3 heads; batch 128, 10,000 steps, Adam
3e-5, 1,000 steps of linear warm-up; K = 2, T = N / 2, tau = N / 4. Figure 2
has N = 4, 8, 16, 32 and 64 (its axis is printed as 2^2 to 2^6).

  python -m launch.train --config=configs/adatape/parity_paper.py:n=64 \
      --workdir=/tmp/parity_paper

Arguments: `n` symbols, `model` adatape, transformer or ut.

Result: not run at this size here; the paper's Figure 2 shows AdaTape solving
it and both others at chance.
"""

import ml_collections

from configs import common
from configs.adatape.common import parity_model


def get_config(arg=''):
  arg = common.parse_arg(arg, n=64, model=('adatape', 'transformer', 'ut'))
  c = ml_collections.ConfigDict()
  c.batch_size = 128
  c.dataset = dict(name='parity', length=arg.n)
  parity_model(
    c, arg.model, arg.n, dict(depth=12, width=192, mlp_dim=768, num_heads=3)
  )
  c.optimizer = dict(
    name='adam', lr=3e-5, schedule='constant', warmup_steps=1000
  )
  c.stages = dict(stage1=dict(steps=10_000))
  c.evals = dict(
    test=dict(type='classification', split='test', every_steps=1000)
  )
  return c
