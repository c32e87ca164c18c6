r"""EAT on labels of your own, such as phishing mail (EAT, section 7.4).

  python -m launch.train --workdir=/tmp/mail \
      --config=configs/eat/labels.py:name=mail,model=dense,pretrained=DIR,data=DIR
  python -m launch.train --workdir=/tmp/mail_eat \
      --config=configs/eat/labels.py:name=mail,teacher=/tmp/mail,data=DIR

Arguments: `name` is a folder in `data` with train.tsv and dev.tsv; the others
are those of `configs.eat.glue` but for `task` and `submit`. The files have the
columns 'sentence' and 'label', and 'source' if rows have one; all names of
labels are those of train.tsv. All of dev.tsv is reported as `dev`; half of it
calibrates, and `calibration` and `frontier` are of the other half.
"""

from configs import common
from configs.eat import glue


def get_config(arg=''):
  items = [item for item in arg.split(',') if item]
  name = [item[5:] for item in items if item.startswith('name=')]
  others = [item for item in items if not item.startswith('name=')]
  has_task = any(item.startswith('task=') for item in others)
  is_legal = len(name) == 1 and not has_task
  common.expect(is_legal, 'name', 'one, and no task', arg)
  submits = [item for item in others if item.startswith('submit=')]
  common.expect(not submits, 'submit', 'none: it is of GLUE alone', arg)
  # Rows like those of SST-2: single texts, some of which may be alike.
  c = glue.get_config(','.join(['task=sst2', *others]))
  data = c.dataset
  c.dataset = dict(
    name='probing', task=name[0], directory=data.directory,
    tokenizer=data.tokenizer, max_length=data.max_length,
    length_buckets=data.length_buckets,
  )  # fmt: skip
  c.evals.dev = dict(type='classification', split='validation')
  return c
