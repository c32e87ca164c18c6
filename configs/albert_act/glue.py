r"""ALBERT with halting on GLUE.

  python -m launch.train --workdir=/tmp/albert_sst2 \
      --config=configs/albert_act/glue.py:task=sst2,checkpoint=/tmp/albert,data=D

Arguments, but for submit also of probing.py:

  task        its name
  data        folder of the task's files; of GLUE empty for TFDS
  checkpoint  a finished run of configs/albert_act/pretrain.py, or a Hugging
              Face ALBERT: its sizes, parameters and tokenizer
  halting     act (default), straight_through, ponder_net, or fixed
  score       kept (default): the halting score is loaded from the checkpoint;
              HF checkpoints have no score and need fresh
  submit      1: as in configs/eat/glue.py

The paper's grids, for python -m launch.sweep: of GLUE grid.txt, of the probing
tasks grid_probing.txt.
"""

import ml_collections

from configs import common


def get_config(arg=''):
  a = arguments(arg, common.GLUE, submit=0)
  c = fine_tuning(a, lr=3e-5)
  c.dataset = common.glue(a, **rows(a))
  split = common.glue_split(a.task)
  c.evals = dict(
    dev=dict(type='glue', split=split),
    depth=dict(type='classification', split=split),
  )
  if a.submit:
    c.evals.update(common.submissions(a.task))
  return c


def arguments(arg, tasks, **others):
  """Reads the arguments of the module."""
  return common.parse_arg(
    arg, task=tasks, data='', checkpoint='', score=('kept', 'fresh'),
    halting=('act', 'straight_through', 'ponder_net', 'fixed'), **others,
  )  # fmt: skip


def rows(a):
  """Returns the fields of data sets of texts."""
  buckets = (16, 32, 64, 128)
  return dict(tokenizer=a.checkpoint, max_length=128, length_buckets=buckets)


def fine_tuning(a, lr):
  """Returns a run without data and evaluators: AdamW, linear decay."""
  c = ml_collections.ConfigDict()
  c.task = 'albert_act.task:FineTune'
  c.batch_size = 32
  c.model = dict(name='albert_act.model:AlbertClassifier', dropout=0.1)
  c.model.rule = common.rule(a.halting)
  if a.checkpoint:
    c.model.from_checkpoint = a.checkpoint
  else:
    c.model.variant = 'albert_base'
  c.loss = dict(ponder_weight=0.0)  # tau; the paper fine-tunes without
  if a.halting == 'ponder_net':
    c.loss = dict(ponder_weight=0.5, prior_rate=0.1)  # of PALBERT
  c.optimizer = common.adamw(lr)
  # The heads of pretraining or of another task, as one pattern: each pattern
  # must match a parameter.
  is_fresh = a.halting == 'fixed' or a.score == 'fresh'
  fresh = 'predictions|sop|head' + '|score' * is_fresh
  c.warm_start = dict(workdir=a.checkpoint, skip=(f'^({fresh})/',))
  c.phases = (dict(epochs=3),)
  c.checkpoint = dict(every_steps=500)
  return c
