"""The teacher of a distillation: loaded, and checked against its student."""

import itertools
import os
from typing import Any

import numpy as np

from dataset_lib import tokenizer
from dataset_lib.errors import ConfigError, InvalidDataError, MissingDataError
from train_lib import loading
from train_lib.run_directory import TOKENIZER

_FIELD = 'loss.teacher'
# Words on which tokenizers with the same vocabulary may differ.
_PROBES = ('Été', 'naïve', '東京x', "don't", 'a\u200db', 'İ')


def load(directory: str, info: Any, own: str) -> Any:
  """Loads the task of a teacher's run.

  Args:
    directory: of the teacher's run.
    info: of the student's data set.
    own: the student's tokenizer; '' if its data are token ids.

  Raises:
    ConfigError: the teacher has another tokenizer or other classes.
  """
  config = loading.load_config(directory, key=_FIELD)
  check_tokenizer(directory, own)
  task = loading.load_task(directory, config)
  if task.info.num_classes != info.num_classes:
    given = f'{directory} with {task.info.num_classes} classes'
    expected = f'a run with the {info.num_classes} classes of the data set'
    raise ConfigError(_FIELD, given, expected)
  names = task.info.class_names, info.class_names
  if all(names) and names[0] != names[1]:
    given = f'{directory} with the classes {", ".join(names[0])}'
    listed = ', '.join(names[1])
    expected = f'a run with the classes of the data set, {listed}'
    raise ConfigError(_FIELD, given, expected)
  return task


def check_tokenizer(teacher: str, own: str) -> None:
  """Raises ConfigError if the teacher's tokenizer gives other token ids.

  Args:
    teacher: directory of the teacher's run.
    own: the student's tokenizer; '' if its data are token ids.
  """
  path = os.path.join(teacher, TOKENIZER)
  if not own or os.path.realpath(own) in map(os.path.realpath, (teacher, path)):
    return
  try:
    ours = tokenizer.load(own)
  except (MissingDataError, InvalidDataError):
    return  # the data set reports it
  expected = f'a run whose {TOKENIZER} gives the ids of {own}'
  try:
    theirs = tokenizer.load(path)
  except (MissingDataError, InvalidDataError) as error:
    wrong = f'{expected} ({error})'
    raise ConfigError(_FIELD, teacher, wrong) from error
  if not _same_ids(ours, theirs):
    raise ConfigError(
      _FIELD,
      teacher,
      f'{expected}; fine-tune a teacher with this tokenizer, or leave '
      "dataset.tokenizer empty for the teacher's",
    )


def _same_ids(ours: tokenizer.Tokenizer, theirs: tokenizer.Tokenizer) -> bool:
  """Returns True if two tokenizers give the same ids for sample words."""
  if (ours.vocab_size, ours.pad_id) != (theirs.vocab_size, theirs.pad_id):
    return False
  names = ours.names(range(ours.vocab_size))
  if names != theirs.names(range(theirs.vocab_size)):
    return False
  words = [name for name in names if name]
  some = list(itertools.islice(words, 0, None, 1 + len(words) // 1000))
  probes = [*some, *(word.upper() for word in some), *_PROBES]
  mine, other = ours.encode(probes), theirs.encode(probes)
  return np.array_equal(mine.tokens, other.tokens) and np.array_equal(
    mine.offsets, other.offsets
  )
