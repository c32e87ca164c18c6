r"""Parity by Adaptive Tape Reading.

Is the number of 1s in a sequence of N symbols even or odd? AdaTape, section
3.2 and Figure 2: K = 2 tokens at a time are read from the input, at most
T = N / 2 times, with threshold tau = N / 4.

  python -m launch.train --config=configs/adatape/parity.py \
      --workdir=/tmp/parity

Arguments after a colon: `n` symbols, `model` adatape, transformer or ut, `size`
laptop or paper:

  python -m launch.train --config=configs/adatape/parity.py:n=32,model=ut \
      --workdir=/tmp/parity_ut

`size=paper` is Transformer-Tiny of Table 3 and appendix A.5: 12 layers, width
192 (printed as 196, which 3 heads do not divide), 10,000 steps of Adam at 3e-5,
not run to the end. Figure 2 has N = 4, 8, 16, 32, 64 (printed as 2^2 to 2^6).

Results: docs/adatape.md.
"""

import ml_collections

from configs import common


def get_config(arg=''):
  a = common.parse_arg(
    arg, n=16, model=('adatape', 'transformer', 'ut'), size=('laptop', 'paper')
  )
  common.expect(a.n >= 4, 'n', 'an integer >= 4', a.n)
  c = ml_collections.ConfigDict()
  c.batch_size = 128
  c.dataset = dict(name='parity', length=a.n)
  c.loss = dict(label_smoothing=0.0)
  is_long = a.n > 16 and a.size == 'laptop'
  if a.size == 'paper':
    size = dict(depth=12, width=192, mlp_dim=768, num_heads=3)
    steps, every = 10_000, 1000
    rate = dict(lr=3e-5, schedule='constant', warmup_steps=1000)
  else:
    size = dict(depth=2, width=32, mlp_dim=64, num_heads=4)
    steps, every = 1000, 250
    # With 1e-3, some seeds do not learn 32 symbols.
    lr = 3e-3 if is_long else 1e-3
    rate = dict(lr=lr, schedule='cosine', warmup_steps=100)
    c.checkpoint = dict(every_steps=500)
  c.optimizer = dict(name='adam', **rate)
  c.phases = (dict(steps=steps),)
  c.evals = dict(
    test=dict(type='classification', split='test', every_steps=every)
  )
  if a.model == 'transformer':
    c.task = 'train_lib.classification:Classification'
    c.model = dict(name='model_lib.vit:TokenTransformer', **size)
  elif a.model == 'ut':
    # The limit of iterations of the shared block is `depth`, but at least 6.
    size['max_steps'] = max(6, size.pop('depth'))
    c.task = 'adatape.task:PonderClassification'
    c.model = dict(name='adatape.universal:UniversalTransformer', **size)
    c.loss.ponder_weight = 0.01
  else:
    c.task = 'adatape.task:TapeClassification'
    c.model = dict(
      name='adatape.parity:ParityModel', tokens_per_step=2, max_steps=a.n // 2,
      threshold=a.n / 4, query_dim=16, norm_scale=0.5, **size,
    )  # fmt: skip
    # The loss of a long tape is larger. Once the task is solved its gradient
    # dominates: it drives the weights of unequal pairs apart, which hides them.
    c.loss.tape_weight = 0.001 if is_long else 0.01
    if is_long:
      # 1s are read first: the class is then whether one shares a pair with
      # another symbol. Read second, two pairs decide, and some seeds fail.
      c.model.query_symbol = 0
  return c
