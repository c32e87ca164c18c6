r"""Parity at the size of the paper: Transformer-Tiny (Tables 3 and Figure 2).

AdaTape, section 3.2 and appendix A.5: 12 layers, width 192 (printed as 196,
which 3 heads do not divide), MLP 768, 3 heads; batch 128, 10,000 steps, Adam
3e-5, 1,000 steps of linear warm-up; K = 2, T = N / 2, tau = N / 4.

  python -m launch.train --config=configs/adatape/parity_paper.py:n=22 \
      --workdir=/tmp/parity_paper

Arguments: `n` symbols, `model` adatape, transformer or ut, `depth`, `width`,
`mlp_dim`, `num_heads`, `steps`, `lr`, `seed`.

Result: not run at this size here; the paper's Figure 2 shows AdaTape solving
it and both others at chance.
"""

from configs import common


def get_config(arg=''):
  arg = common.parse_arg(
    arg,
    n=22,
    model=('adatape', 'transformer', 'ut'),
    depth=12,
    width=192,
    mlp_dim=768,
    num_heads=3,
    steps=10_000,
    lr=3e-5,
    seed=0,
  )
  common.check_parity_length(arg.n)
  c = common.base()
  c.seed = arg.seed
  c.batch_size = 128
  c.dataset = dict(name='parity', length=arg.n)
  size = {key: arg[key] for key in ('depth', 'width', 'mlp_dim', 'num_heads')}
  common.parity_model(c, arg.model, arg.n, size)
  c.optimizer.update(
    name='adam', lr=arg.lr, schedule='constant', warmup_steps=1000.0
  )
  c.stages.stage1.steps = arg.steps
  c.evals = dict(
    test=dict(type='classification', split='test', every_steps=1000)
  )
  return c.lock()
