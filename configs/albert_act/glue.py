r"""ALBERT with halting on GLUE.

  python -m launch.train --workdir=/tmp/albert_sst2 \
      --config=configs/albert_act/glue.py:task=sst2,checkpoint=/tmp/albert,data=D

Arguments: see `configs.albert_act.common`.
"""

from configs.albert_act import common

TASKS = (
  'sst2', 'cola', 'mrpc', 'qqp', 'stsb', 'mnli', 'qnli', 'rte', 'wnli'
)  # fmt: skip


def get_config(arg=''):
  a = common.arguments(arg, TASKS)
  c = common.fine_tuning(a, lr=3e-5)
  c.dataset = dict(
    name='glue', task=a.task, directory=a.data,
    builder='' if a.data else f'glue/{a.task}', tokenizer=a.checkpoint,
    max_length=128, length_buckets=(16, 32, 64, 128),
  )  # fmt: skip
  split = 'validation_matched' if a.task == 'mnli' else 'validation'
  c.evals = dict(
    dev=dict(type='glue', split=split),
    depth=dict(type='classification', split=split),
  )
  return c
