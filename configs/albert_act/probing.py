r"""ALBERT with halting on a probing task of SentEval.

  python -m launch.train --workdir=/tmp/albert_tense --config=\
      configs/albert_act/probing.py:task=past_present,checkpoint=/tmp/albert,data=D

Arguments: see `configs.albert_act.glue`. The files may be those of SentEval, or
TSV files with named columns. A tenth of train is held out.
"""

from configs.albert_act.glue import arguments, fine_tuning, rows

TASKS = (
  'past_present', 'subj_number', 'obj_number', 'top_constituents',
  'bigram_shift', 'coordination_inversion', 'odd_man_out', 'sentence_length',
  'tree_depth', 'word_content',
)  # fmt: skip


def get_config(arg=''):
  a = arguments(arg, TASKS)
  c = fine_tuning(a, lr=5e-5)
  c.dataset = dict(name='probing', task=a.task, directory=a.data, **rows(a))
  c.train_split = 'train[:90%]'
  c.evals = dict(
    dev=dict(type='classification', split='train[90%:]'),
    test=dict(type='classification', split='test'),
  )
  return c
