"""What fine-tuning of ALBERT with halting shares, on GLUE and on probing tasks.

Arguments of the files beside this one:

  task        its name
  data        folder of the task's files; of GLUE empty for TFDS
  checkpoint  a finished run of configs/albert_act/pretrain.py, or a Hugging
              Face ALBERT: its sizes, parameters and tokenizer
  halting     act (default), straight_through, or fixed
  score       kept (default) or fresh: whether the halting score begins as the
              checkpoint has it; one of Hugging Face has none
  tau         weight of the ponder cost; the paper fine-tunes without (0)
  lr, batch, epochs, examples (of train, 0 for all), seed

The paper's grids, for python -m launch.sweep: of GLUE grid.txt, of the probing
tasks grid_probing.txt. Its learning rate of probing is the default there.
"""

from typing import Any

import ml_collections

from configs import common


def arguments(
  arg: str, tasks: tuple[str, ...], **defaults: Any
) -> ml_collections.ConfigDict:
  """The arguments of a file beside this one.

  Args:
    arg: the argument of the config file; see the module.
    tasks: the legal tasks.
    **defaults: of the arguments that differ between the files.

  Raises:
    ValueError: for an illegal argument.
  """
  shared = dict(
    task=tasks, data='', checkpoint='',
    halting=('act', 'straight_through', 'fixed'), score=('kept', 'fresh'),
    tau=0.0, lr=3e-5, batch=32, epochs=3, examples=0, seed=0,
  )  # fmt: skip
  return common.parse_arg(arg, **(shared | defaults))


def fine_tuning(a: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """A run without its data: AdamW, 10 % warm-up, linear decay."""
  c = common.base()
  c.seed = a.seed
  c.task = 'albert_act.task:FineTune'
  c.batch_size = a.batch
  # Sizes of 0 and empty names are filled in from the checkpoint.
  c.model = dict(
    name='albert_act.model:AlbertClassifier', variant='', width=0,
    embedding_width=0, max_iterations=0, mlp_dim=0, num_heads=0, num_groups=0,
    inner_group=0, vocab_size=0, max_positions=0, type_vocab_size=-1,
    activation='', norm_epsilon=0.0,
    halting='' if a.halting == 'fixed' else a.halting, epsilon=0.01,
    halting_bias=-2.0, dropout=0.1, attention_dropout=0.0,
    classifier_dropout=0.1,
  )  # fmt: skip
  c.loss.ponder_weight = a.tau
  c.optimizer.update(
    lr=a.lr, schedule='linear', warmup_steps=0.1, weight_decay=0.01, eps=1e-6
  )
  # Of pretraining everything but its own heads; a head of this task is new.
  # One pattern, since each has to match something.
  fresh = ['predictions', 'sop', 'head']
  if a.halting == 'fixed' or a.score == 'fresh':
    fresh.append('score')
  c.warm_start.update(workdir=a.checkpoint, skip=(f'^({"|".join(fresh)})/',))
  c.stages = dict(stage1=common.stage(epochs=float(a.epochs)))
  c.checkpoint.update(every_steps=500, keep=1)
  return c
