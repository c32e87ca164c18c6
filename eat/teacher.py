"""Whether a teacher reads the same tokens as what learns from it."""

import itertools
import os

import numpy as np

from dataset_lib import tokenizer
from dataset_lib.errors import ConfigError, InvalidDataError, MissingDataError
from train_lib.run_directory import TOKENIZER

# Words on which tokenizers with the same vocabulary may differ.
_PROBES = ('Été', 'naïve', '東京x', "don't", 'a\u200db', 'İ')


def check_tokenizer(teacher: str, own: str) -> None:
  """Raises `ConfigError` if a teacher would read other ids than it learned.

  Args:
    teacher: directory of the teacher's run.
    own: the tokenizer of the data; '' if the data are token ids already.
  """
  path = os.path.join(teacher, TOKENIZER)
  if not own or os.path.realpath(own) in map(os.path.realpath, (teacher, path)):
    return
  try:
    ours = tokenizer.load(own)
  except (MissingDataError, InvalidDataError):
    return  # the data set says what is wrong
  expected = f'a run whose {TOKENIZER} gives the ids of {own}'
  try:
    theirs = tokenizer.load(path)
  except (MissingDataError, InvalidDataError) as error:
    wrong = f'{expected} ({error})'
    raise ConfigError('loss.teacher', teacher, wrong) from error
  if not _same_ids(ours, theirs):
    raise ConfigError(
      'loss.teacher',
      teacher,
      f'{expected}; fine-tune a teacher with this tokenizer, or leave '
      "dataset.tokenizer empty for the teacher's",
    )


def _same_ids(ours: tokenizer.Tokenizer, theirs: tokenizer.Tokenizer) -> bool:
  """Whether two tokenizers have one vocabulary and split words alike."""
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
