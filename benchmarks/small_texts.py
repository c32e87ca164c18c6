"""Makes five small sets of texts, as strangers have them, of public rows.

  python -m benchmarks.small_texts --data=FOLDER --out=/tmp/sets
  python -m benchmarks.own_texts --data=/tmp/sets --workdir=/tmp/own_texts ...

`--data` has tab-separated files without quotes, as GLUE's, by the names in
`PUBLIC`; the first line names the columns. Every set has 400 rows, or 1,000 of
pairs, as train.csv, and at most 1,000 others as test.csv. Rows are drawn by
`--seed`, of each set by itself; no text comes twice, and rows of an unknown
label are left out. Tickets are made of templates.
"""

import csv
import dataclasses
import gzip
import itertools
import pathlib
import random
from collections.abc import Sequence

from core.errors import ConfigError
from core.fields import flag
from launch import command_line

TEST_ROWS = 1000


@dataclasses.dataclass(frozen=True)
class Public:
  """Two files of a public data set, and the columns that are kept."""

  train: str
  test: str
  columns: tuple[str, ...]  # text, label and maybe pair
  rows: int = 400


PUBLIC = {
  'mnli_genre': Public(
    'glue/mnli/train', 'glue/mnli/dev_matched', ('premise', 'genre')
  ),
  'past_present': Public(
    'probing_xprobe_en/past_present/train',
    'probing_xprobe_en/past_present/test', ('sentence', 'label'),
  ),
  'qqp': Public(
    'qqp_part/train', 'qqp_part/dev', ('question1', 'label', 'question2'), 1000
  ),
  'sst2': Public('glue/sst2/train', 'glue/sst2/dev', ('sentence', 'label')),
}  # fmt: skip
NAMES = 'text', 'label', 'pair'
UNKNOWN = 'unknown'  # the genre of a part of MNLI's train rows

# Templates of a class; {} is one of the words that follow.
TICKETS = {
  'billing': (
    'I was charged twice for {}', 'the invoice of {} shows a wrong amount',
    'please refund my payment for {}', 'why is the price of {} higher now',
  ),
  'access': (
    'I cannot sign in to {}', 'the password of {} is not accepted',
    'reset my account for {} please', 'a code for {} never reached my phone',
  ),
  'delivery': (
    'the parcel with {} has not arrived', 'where is my order of {}',
    'tracking of {} has stopped since Monday', '{} was sent to an old address',
  ),
  'defect': (
    '{} stopped working after a day', 'the screen of {} is broken',
    '{} makes a strange noise', 'my {} does not turn on any more',
  ),
  'cancellation': (
    'I want to end the contract for {}', 'please cancel {} from next month',
    'how do I stop the renewal of {}', 'close everything that I have for {}',
  ),
}  # fmt: skip
THINGS = (
  'the headphones', 'the premium plan', 'a tablet', 'the family tariff',
  'the router', 'my camera', 'the online course', 'the watch', 'a keyboard',
  'the cloud storage', 'the printer', 'the music service',
)  # fmt: skip
STARTS = 'Hello,', 'Hi there,', 'Good morning,', 'To whom it may concern:', ''
ENDS = (
  'Thank you.', 'This is urgent!', 'Please answer soon.', 'Kind regards', '',
  'I have asked before.',
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  data: str = flag('folder of public data sets', metavar='FOLDER')
  out: str = flag('a new folder for the sets', metavar='FOLDER')
  seed: command_line.Count = flag('chooses the rows', 0)


def run(flags: Flags) -> None:
  out = pathlib.Path(flags.out)
  if out.exists():
    raise ConfigError('--out', flags.out, 'a folder that does not exist')
  made = _shuffled(tickets(), 'tickets', flags)
  sets = {'tickets': (made[:400], made[400:])}
  for name, public in PUBLIC.items():
    train, test = (
      _shuffled(_rows(flags.data, file, public.columns), name, flags)
      for file in (public.train, public.test)
    )
    sets[name] = train[: public.rows], test
  for name, (train, test) in sets.items():
    known = {text for text, *_ in train}
    others = [row for row in test if row[0] not in known]
    _write(out / name / 'train.csv', train)
    _write(out / name / 'test.csv', others[:TEST_ROWS])


def tickets() -> list[Sequence[str]]:
  """Returns (text, label) of all templates, things, starts and ends."""
  parts = itertools.product(TICKETS, range(4), THINGS, STARTS, ENDS)
  return [
    (f'{start} {TICKETS[kind][n].format(thing)}. {end}'.strip(), kind)
    for kind, n, thing, start, end in parts
  ]


def _shuffled(
  rows: list[Sequence[str]], name: str, flags: Flags
) -> list[Sequence[str]]:
  return random.Random(f'{name} {flags.seed}').sample(rows, len(rows))


def _rows(
  folder: str, name: str, columns: Sequence[str]
) -> list[Sequence[str]]:
  """Returns the columns of rows that lack none; a text comes once."""
  path = pathlib.Path(folder, f'{name}.tsv.gz')
  with gzip.open(path, 'rt', encoding='utf-8', newline='\n') as file:
    reader = csv.DictReader(file, delimiter='\t', quoting=csv.QUOTE_NONE)
    rows = [tuple(row[name] for name in columns) for row in reader]
  known = [row for row in rows if all(row) and row[1] != UNKNOWN]
  return [*{row[0]: row for row in known}.values()]


def _write(path: pathlib.Path, rows: list[Sequence[str]]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open('w', newline='', encoding='utf-8') as file:
    writer = csv.writer(file)
    writer.writerow(NAMES[: len(rows[0])])
    writer.writerows(rows)


main = command_line.Command('small_texts', __doc__, Flags, run, 'benchmarks')

if __name__ == '__main__':
  raise SystemExit(main())
