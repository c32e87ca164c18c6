"""Which settings are within a few points of the dense run, and how fast."""

import dataclasses

import numpy as np

from eat.exits import Rule
from launch.eat_report import fastest
from tests.launch.eat_report.toy import LOGITS, fake, measured


def setting(name, quality, exits=(0, 0, 0)):
  [one] = measured(fake(LOGITS), {'never': (Rule('never'), None)})
  point = dataclasses.replace(one.point, quality=quality)
  return dataclasses.replace(one, name=name, point=point, exits=np.array(exits))


DENSE = setting('dense/never', 0.9, (1, 1, 1))
SETTINGS = [
  setting('as_good', 0.9, (1, 1, 1)),
  setting('near', 0.89, (1, 1, 0)),  # exactly a point
  setting('far', 0.885, (1, 0, 0)),
  setting('lost', 0.5),
]


def test_without_times_the_cheapest_as_served():
  rows = fastest.fastest(SETTINGS, DENSE, {})
  assert [(row['points'], row['setting']) for row in rows] == [
    (0.5, 'as_good'), (1.0, 'near'), (2.0, 'far'),
  ]  # fmt: skip
  # 60 a row at the last head and 30 at the first.
  assert rows[1]['flops_served_share'] == 150 / 180
  assert 'speedup_batch' not in rows[1]
  line = fastest.line(rows, DENSE)
  assert line.startswith('cheapest within')
  assert '1: near (89.0, 83 % of its FLOPs as served)' in line


def test_with_times_the_fastest_of_the_timed():
  timings = {
    name: {'speedup_batch_1': alone, 'speedup_batch': together}
    for name, alone, together in (
      ('dense/never', 1.0, 1.0), ('near', 1.5, 1.25), ('far', 1.4, 3.0),
      ('lost', 9.0, 9.0),
    )
  }  # fmt: skip
  rows = fastest.fastest(SETTINGS, DENSE, timings)
  # 'as_good' was not timed, 'far' is slower at batch 1 than 'near'.
  assert [row['setting'] for row in rows] == [None, 'near', 'near']
  assert rows[2]['speedup_batch'] == 1.25
  line = fastest.line(rows, DENSE)
  assert line == (
    'fastest within so many points of dense/never (90.0), chosen on these '
    'rows: 0.5: none; 1: near (89.0, 1.50x at batch 1, 1.25x in full batches); '
    '2: near (89.0, 1.50x at batch 1, 1.25x in full batches)'
  )
