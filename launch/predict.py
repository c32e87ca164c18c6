"""Answers texts, images or puzzles with a model, one JSON object per line.

  python -m launch.predict --workdir=/tmp/sst2 < lines.jsonl > answers.jsonl
  python -m launch.predict --bundle=/tmp/sst2.bundle < lines.jsonl
  python -m launch.predict --workdir=/tmp/sst2 --serve=tau=0.8 \\
      --thresholds=forum=0.95,news=0.8 --minimum_retention=forum=0.9

A line is a string or {"text": ...} with optionally "pair", "source" and "id",
{"image": PATH}, {"tokens": [...]} or {"puzzle": ...}. Answers are in the order
of the lines, {"id": 7, "label": "positive", "probabilities": {...}, ...}, or
{"id": 7, "error": ...}; to a line without an id {"line": 3, ...}, its number.
Warnings, drift and statistics go to stderr. It fails if every line has failed.
docs/serving.md has the fields of answers and the options of each family.

A run on a GLUE task answers whole splits of its data set, or of the official
folders in --data, as files for the GLUE server; `ax` are the diagnostic rows:

  python -m launch.predict --workdir=/tmp/mnli --out=/tmp/glue \\
      --glue=test_matched,test_mismatched,ax
"""

import collections
import contextlib
import dataclasses
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

from core import files
from core.errors import ConfigError, InvalidDataError
from core.fields import flag
from launch import command_line, serving

MAX_LINE = 2**24  # bytes, without the newline
_WHOLE = re.compile('(validation|dev|test)(_matched|_mismatched)?|ax')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(serving.Flags):
  """Flags of `launch.predict`."""

  glue: str = flag("splits of the run's GLUE task, such as test", '', 'SPLITS')
  data: str = flag("of --glue, default: the run's", '', 'DIRECTORY')
  out: str = flag('of --glue: a folder for files', '', 'DIRECTORY')

  def __post_init__(self):
    super().__post_init__()
    if not self.glue:
      command_line.refuse(self, ['data', 'out'], 'nothing without --glue')
    elif self.bundle or not self.out:
      name, need = ('bundle', 'a run') if self.bundle else ('out', 'a folder')
      raise ConfigError(name, getattr(self, name), f'{need} with --glue')


def run(flags: Flags) -> None:
  """Loads the model, compiles it, answers the lines of stdin on stdout."""
  from serve_lib.process import own_process

  own_process()
  splits = open_splits(flags) if flags.glue else {}
  with (
    serving.build_engine(flags) as engine,
    serving.statistics(engine, flags.log_every),
  ):
    if splits:
      write_answers(engine, splits, flags.out, flags.max_pending)
    else:
      # Not `sys.stdin`: at exit Python takes its lock, which a thread that is
      # blocked in `readline` holds.
      lines = read_lines(os.fdopen(0, 'rb', closefd=False))
      write = functools.partial(print, flush=True)
      answer_all(engine, lines, write, flags.max_pending)


def open_splits(flags: Flags) -> dict[str, Any]:
  """Returns the rows of the splits of --glue by the names of their files."""
  from dataset_lib import builder, contract
  from eval_lib import glue, submission
  from train_lib import loading

  command_line.check_place('--out', flags.out)
  data = submission.unlabelled(loading.load_config(flags.workdir).dataset)
  data |= {'directory': flags.data} if flags.data else {}
  info = loading.load_info(flags.workdir)
  sources = {}
  for split in flags.glue.split(','):
    name = glue.name_of(data['task'], split)
    if not _WHOLE.fullmatch(split):
      expected = 'whole splits: validation, test, of mnli also '
      expected += 'validation_mismatched, test_mismatched and ax'
      raise ConfigError('--glue', split, expected)
    if name in sources:
      raise ConfigError('--glue', flags.glue, f'one split for {name}.tsv')
    try:
      # It refuses a split with a row that cannot be read.
      rows = builder.build(data, split=split, train=False, seed=0, batch_size=1)
    except ConfigError as error:
      field = '--glue' if error.field == 'split' else error.field
      raise ConfigError(field, error.given, error.expected) from error
    contract.check_inputs(info, rows.info)
    contract.class_ids(info, rows.info)  # answers go by name
    sources[name] = rows.source
  return sources


def write_answers(
  engine: Any, splits: Mapping[str, Any], folder: str, window: int
) -> None:
  """Writes a file of answers for each of `open_splits`."""
  import numpy as np

  from eval_lib import submission
  from serve_lib.chain import checked

  for name, rows in splits.items():
    names = rows.info.class_names
    records = map(rows.record, range(len(rows)))
    items = ({k: r[k] for k in ('tokens', 'token_types')} for r in records)
    labels = []
    with contextlib.closing(engine.stream(items, window)) as answers:
      for answer in answers:
        label = checked([answer])[0].label
        labels.append(names.index(label) if names else label)
    path = submission.write(folder, name, np.array(labels))
    print(f'{path}: {len(labels)} rows')


def read_lines(file: BinaryIO) -> Iterator[tuple[Any, Any]]:
  """Yields ({'id': ...} or {'line': number}, item or `InputError`) of lines."""
  from serve_lib.chain import InputError

  read = functools.partial(file.readline, MAX_LINE + 1)  # with its newline
  for number, line in enumerate(iter(read, b''), 1):
    try:
      if len(line) > MAX_LINE and not line.endswith(b'\n'):
        while line and not line.endswith(b'\n'):
          line = read()
        raise ValueError(f'expected at most {MAX_LINE} bytes, got more')
      yield _read_line(line, number)
    except ValueError as error:
      yield {'line': number}, InputError(f'line: {error}')


def _read_line(line: bytes, number: int) -> tuple[Any, Any]:
  """Returns the line's id, or its number, as in its answer, and its item."""
  from serve_lib.chain import ILLEGAL_ID, take_id

  try:
    # Editors on Windows write a byte order mark first.
    item = files.loads(line.decode('utf-8-sig'))
  except ValueError as error:
    message = f'expected one JSON value in UTF-8, got {error}'
    raise ValueError(message) from error
  ids = take_id(item)
  if isinstance(item, dict) and 'id' in item:
    raise ValueError(ILLEGAL_ID)
  return ids or {'line': number}, item


def answer_all(
  engine: Any,
  lines: Iterator[tuple[Any, Any]],
  write: Callable[[str], None],
  window: int,
) -> None:
  """Writes the JSON of one answer for each (id, item), in their order.

  Raises InvalidDataError if there are lines and all have failed.
  """
  from serve_lib.chain import Failure

  ids: collections.deque[Any] = collections.deque()
  count, good = 0, False

  def items():
    for name, item in lines:
      ids.append(name)
      yield item

  with contextlib.closing(engine.stream(items(), window)) as answers:
    for answer in answers:
      is_bad = isinstance(answer, Failure)
      fields = {'error': str(answer.error)} if is_bad else answer.as_dict()
      write(json.dumps(ids.popleft() | fields, allow_nan=False))
      count, good = count + 1, good or not is_bad
  if count and not good:
    raise InvalidDataError(f'all {count} lines have failed, see their answers')


main = command_line.Command('predict', __doc__, Flags, run)

if __name__ == '__main__':
  sys.exit(main())
