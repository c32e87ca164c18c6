r"""EAT on labels of your own, such as phishing mail (EAT, section 7.4).

  python -m launch.train --workdir=/tmp/mail \
      --config=configs/eat/labels.py:name=mail,model=dense,pretrained=DIR,data=DIR
  python -m launch.train --workdir=/tmp/mail_eat \
      --config=configs/eat/labels.py:name=mail,teacher=/tmp/mail,data=DIR

Arguments: `name` is a folder in `data` with train.tsv and dev.tsv; the others
are as in `configs.eat.glue`, without `task` and `submit`. The files have the
columns 'sentence' and 'label', and 'source' if rows have one; train.tsv names
all labels. All of dev.tsv is reported as `dev`; half of it calibrates, and
`calibration` and `frontier` are of the other half.
"""

from configs import common
from configs.eat import glue


def get_config(arg=''):
  a = common.parse_arg(arg, name='', **glue.ARGUMENTS)
  common.expect(a.name, 'name', 'a folder in data', a.name)
  # Single texts as in SST-2, some of which may be alike.
  a.task = 'sst2'
  c = glue.fine_tuning(a)
  del c.dataset.builder
  c.dataset.update(name='probing', task=a.name)
  dev = dict(type='classification', split='validation')
  halves = 'validation[50%:]', 'validation[:50%]'
  c.evals = dict(dev=dev, **glue.of_confidence(*halves))
  return c
