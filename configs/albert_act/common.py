"""Fine-tuning of ALBERT with halting: the part that all tasks share.

Arguments of the files beside this one:

  task        its name
  data        folder of the task's files; of GLUE empty for TFDS
  checkpoint  a finished run of configs/albert_act/pretrain.py, or a Hugging
              Face ALBERT: its sizes, parameters and tokenizer
  halting     act (default), straight_through, or fixed
  score       kept (default) or fresh: whether the halting score begins as the
              checkpoint has it; one of Hugging Face has none

The paper's grids, for python -m launch.sweep: of GLUE grid.txt, of the probing
tasks grid_probing.txt.
"""

import ml_collections

from configs import common


def arguments(arg: str, tasks: tuple[str, ...]) -> ml_collections.ConfigDict:
  """Reads the arguments of a file beside this one; see the module."""
  return common.parse_arg(
    arg,
    task=tasks,
    data='',
    checkpoint='',
    halting=('act', 'straight_through', 'fixed'),
    score=('kept', 'fresh'),
  )


def fine_tuning(
  a: ml_collections.ConfigDict, lr: float
) -> ml_collections.ConfigDict:
  """Returns a run without data and evaluators: AdamW, linear decay."""
  c = ml_collections.ConfigDict()
  c.task = 'albert_act.task:FineTune'
  c.batch_size = 32
  c.model = dict(
    name='albert_act.model:AlbertClassifier',
    halting='' if a.halting == 'fixed' else a.halting,
    epsilon=0.01,
    halting_bias=-2.0,
    dropout=0.1,
    attention_dropout=0.0,
    classifier_dropout=0.1,
  )
  if a.checkpoint:
    c.model.from_checkpoint = a.checkpoint
  else:
    c.model.variant = 'albert_base'
  c.loss = dict(ponder_weight=0.0)  # tau; the paper fine-tunes without
  c.optimizer = dict(
    name='adamw', lr=lr, schedule='linear', warmup_steps=0.1,
    weight_decay=0.01, eps=1e-6,
  )  # fmt: skip
  # The heads of pretraining or of another task; one pattern, since each has to
  # match something.
  fresh = 'predictions|sop|head'
  if a.halting == 'fixed' or a.score == 'fresh':
    fresh += '|score'
  c.warm_start = dict(workdir=a.checkpoint, skip=(f'^({fresh})/',))
  c.stages = dict(stage1=dict(epochs=3))
  c.checkpoint = dict(every_steps=500, keep=1)
  return c
