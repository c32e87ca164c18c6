"""The nine tasks of GLUE: where they lie, their columns, their labels.

Wang et al., "GLUE", ICLR 2019. Label ids are those of GLUE's own code and of
TFDS; names of columns are given for each layout that is around.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dataset_lib.errors import BadRecord

MAX_SCORE = 5.0  # of STS-B


@dataclasses.dataclass(frozen=True)
class GlueTask:
  """One task.

  Attributes:
    folder: its folder among the official files.
    texts: names of the one or two text columns; alternatives, best first.
    label: names of the label's column; alternatives, best first.
    class_names: name of each label id; () for a regression.
    headless: the columns of official files that have no header.
  """

  folder: str
  texts: tuple[tuple[str, ...], ...]
  label: tuple[str, ...]
  class_names: tuple[str, ...]
  headless: tuple[str, ...] = ()

  @property
  def is_regression(self) -> bool:
    """Whether the label is a number and not a class."""
    return not self.class_names

  @property
  def num_classes(self) -> int:
    """Of a classification; 1 for a regression."""
    return max(len(self.class_names), 1)

  def read_label(self, text: str) -> int | float:
    """The label that a file has as an id, as a name, or as a score.

    Raises:
      BadRecord: it is none that the task has.
    """
    text = text.strip()
    if self.is_regression:
      return check_score(_number(text))
    names = list(self.class_names)
    if text in names:
      return names.index(text)
    ids = [str(label) for label in range(len(names))]
    if text in ids:
      return ids.index(text)
    legal = ', '.join(f'{label} {name}' for label, name in enumerate(names))
    raise BadRecord('illegal_label', '', f'label {text!r} is none of {legal}')


def _number(text: str) -> float:
  try:
    return float(text)
  except ValueError:
    return math.nan


def check_score(score: float) -> float:
  """The score; raises BadRecord unless it is in [0, 5]."""
  if not 0.0 <= score <= MAX_SCORE:  # False for NaN
    raise BadRecord(
      'illegal_label', '', f'score {score} not in [0, {MAX_SCORE}]'
    )
  return score


_PAIR = (('sentence1', 'sentence2'),)
_ENTAILMENT = ('entailment', 'not_entailment')

TASKS = {
  'cola': GlueTask(
    'CoLA',
    (('sentence',),),
    ('label', 'is_acceptable'),
    ('unacceptable', 'acceptable'),
    headless=('source', 'label', 'mark', 'sentence'),
  ),
  'sst2': GlueTask(
    'SST-2', (('sentence',),), ('label',), ('negative', 'positive')
  ),
  'mrpc': GlueTask(
    'MRPC',
    (*_PAIR, ('#1 String', '#2 String')),
    ('label', 'Quality'),
    ('not_equivalent', 'equivalent'),
  ),
  'qqp': GlueTask(
    'QQP',
    (('question1', 'question2'),),
    ('is_duplicate', 'label'),
    ('not_duplicate', 'duplicate'),
  ),
  'stsb': GlueTask('STS-B', _PAIR, ('score', 'label'), ()),
  'mnli': GlueTask(
    'MNLI',
    (('premise', 'hypothesis'), *_PAIR),
    ('gold_label', 'label'),
    ('entailment', 'neutral', 'contradiction'),
  ),
  'qnli': GlueTask(
    'QNLI', (('question', 'sentence'),), ('label',), _ENTAILMENT
  ),
  'rte': GlueTask('RTE', _PAIR, ('label',), _ENTAILMENT),
  'wnli': GlueTask('WNLI', _PAIR, ('label',), ('not_entailment', 'entailment')),
}


# Rows of one split share a premise, a question or an article, so they are not
# independent: several hypotheses to a premise, a question in several pairs.
REPEATED_TEXTS = ('mnli', 'qqp', 'qnli', 'wnli')


def canonical_split(task: str, name: str) -> str:
  """TFDS's name of a split: 'dev' is 'validation', of MNLI the matched one."""
  first, underscore, kind = name.partition('_')
  first = 'validation' if first == 'dev' else first
  if task == 'mnli' and first != 'train' and not kind:
    return f'{first}_matched'
  return first + underscore + kind


def num_texts(dataset: Mapping[str, Any]) -> int | None:
  """How many texts a row of a run's data has; None if that is not known.

  Args:
    dataset: the run's configuration of its data.
  """
  if dataset.get('name') == 'probing':
    return 1
  if dataset.get('name') != 'glue':
    return None
  return len(TASKS[dataset['task']].texts[0])
