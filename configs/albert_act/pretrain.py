r"""Pretraining of ALBERT from raw text, with tokens that halt or without.

  python -m launch.prepare_corpus --input=DIR --out=/tmp/corpus
  python -m launch.train --workdir=/tmp/albert \
      --config=configs/albert_act/pretrain.py:corpus=/tmp/corpus,variant=small

The protocol of "How Many Layers and Why?" (Simoulin and Crabbe 2021): LAMB at
1.76e-3, batches of 4,096 rows of 128 tokens, 112,500 steps, 20 % of the words
masked in n-grams of up to 3, tau 1e-3, 5e-4 and 2.5e-4 for up to 6, 12 and 24
iterations. Its warm-up is not printed; ALBERT takes 3,125 of 125,000 steps.

Arguments:

  corpus      directory of a prepared corpus
  variant     tiny, small, base (the paper's), albert_* (Lan et al. 2020), or
              micro and mini for a laptop
  halting     act, straight_through, fixed: all iterations for every token, or
              bert: fixed, no shared weights, embeddings of full width
  length      the max_length used by launch.prepare_corpus
  steps       112,500
  iterations  the most; 0: as the variant
  tau         weight of the ponder cost; 0: 0.768 / (iterations * length), the
              paper's at length 128
  tau_from    share of the steps without ponder cost, after which its weight
              rises linearly to tau, for small models (docs/albert_act.md); 0
              (paper): tau applies from step 1
"""

import ml_collections

from configs import common

WIDTHS = {'micro': 128, 'mini': 256}  # others: 768
ITERATIONS = {
  'small': 12, 'tiny': 6, 'base': 24, 'micro': 6, 'mini': 12,
  'albert_base': 12, 'albert_large': 24, 'albert_xlarge': 24,
  'albert_xxlarge': 12,
}  # fmt: skip


def get_config(arg=''):
  a = common.parse_arg(
    arg, corpus='', variant=tuple(ITERATIONS),
    halting=('act', 'straight_through', 'fixed', 'bert'), length=128,
    steps=112_500, iterations=0, tau=0.0, tau_from=0.0,
  )  # fmt: skip
  iterations = a.iterations or ITERATIONS[a.variant]
  fixed = a.halting in ('fixed', 'bert')
  tau = 0.0 if fixed else a.tau or 0.768 / (iterations * a.length)
  c = ml_collections.ConfigDict()
  c.task = 'albert_act.pretraining:Pretraining'
  c.batch_size = 4096
  c.num_micro = 1  # more: micro-batches that fit the memory
  c.dataset = dict(
    name='pretraining', directory=a.corpus, max_length=a.length,
    mask_share=0.2, max_ngram=3, short_share=0.1,
  )  # fmt: skip
  rule = common.rule('fixed' if fixed else a.halting)
  name = 'albert_act.model:AlbertPretraining'
  c.model = dict(name=name, variant=a.variant, rule=rule)
  if a.iterations:
    c.model.max_iterations = iterations
  if a.halting == 'bert':
    is_legal = not a.variant.startswith('albert')
    expected = 'tiny, small, base, micro or mini with halting=bert'
    common.expect(is_legal, 'variant', expected, a.variant)
    width = WIDTHS.get(a.variant, 768)
    c.model.update(num_groups=iterations, embedding_width=width)
  c.loss = dict(ponder_weight=tau, sop_weight=1.0)
  c.optimizer = dict(
    name='lamb', lr=1.76e-3, schedule='linear', warmup_steps=0.025,
    weight_decay=0.01, eps=1e-6,
  )  # fmt: skip
  c.phases = (dict(steps=a.steps),)
  if a.tau_from and tau:
    free = round(a.steps * a.tau_from)
    legal = f'a share that is a step or more of {a.steps}, and leaves one'
    common.expect(0 < free < a.steps, 'tau_from', legal, a.tau_from)
    rising = dict(ponder_weight=('linear', 0.0, tau))
    c.phases = (
      dict(name='free', steps=free, knobs=dict(ponder_weight=0.0)),
      dict(name='ponder', steps=a.steps - free, knobs=rising),
    )
  c.evals = dict(
    dev=dict(type='classification', split='validation', every_steps=5000)
  )
  c.checkpoint = dict(every_steps=1000)
  return c
