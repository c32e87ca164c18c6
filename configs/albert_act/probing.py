r"""ALBERT with halting on a probing task of SentEval.

  python -m launch.train --workdir=/tmp/albert_depth \
      --config=configs/albert_act/probing.py:task=tree_depth,checkpoint=A,data=D

Arguments: see `configs.albert_act.glue`; and `held_out`, percent of the train
split to evaluate on, 10 by default, 0 for the validation split of the files.
The files are as in SentEval, or TSV files with named columns.
"""

from configs import common
from configs.albert_act.glue import arguments, fine_tuning, rows

TASKS = (
  'past_present', 'subj_number', 'obj_number', 'top_constituents',
  'bigram_shift', 'coordination_inversion', 'odd_man_out', 'sentence_length',
  'tree_depth', 'word_content',
)  # fmt: skip


def get_config(arg=''):
  a = arguments(arg, TASKS, held_out=10)
  c = fine_tuning(a, lr=5e-5)
  c.dataset = dict(name='probing', task=a.task, directory=a.data, **rows(a))
  c.train_split, split = common.held_out(a.held_out)
  c.evals = dict(
    dev=dict(type='classification', split=split),
    test=dict(type='classification', split='test'),
  )
  return c
