"""The official metrics of the nine GLUE tasks (Wang et al., 2019, table 1).

Undefined metrics are 0, not NaN: F1 without positives, of constant predictions.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import scipy.stats
import sklearn.metrics
from jaxtyping import Float, Num

from core.errors import ConfigError, InvalidDataError
from dataset_lib.text_rows import MAX_SCORE
from dataset_lib.text_tasks import GLUE as TASKS
from eval_lib import evaluator, predictions

# The first one is the score, as in the papers; the leaderboard averages two.
TASK_METRICS = dict.fromkeys(TASKS, ('accuracy',)) | {
  'cola': ('matthews',),
  'mrpc': ('f1', 'accuracy'),
  'qqp': ('f1', 'accuracy'),
  'stsb': ('pearson', 'spearman'),
}
# GLUE task; '' for the data set's own.
TaskName = Literal['', *TASK_METRICS]


def correlation(
  labels: Any, predicted: Any, function: Any = scipy.stats.pearsonr
) -> float:
  """Returns a correlation, by default Pearson's; 0 if an input is constant."""
  if np.ptp(predicted) == 0 or np.ptp(labels) == 0:
    return 0.0
  labels, predicted = (np.asarray(x, np.float64) for x in (labels, predicted))
  return float(function(labels, predicted).statistic)


# `(labels [N], predicted [N]) -> float`
_METRICS: dict[str, Callable[..., float]] = {
  'accuracy': sklearn.metrics.accuracy_score,
  'f1': functools.partial(
    sklearn.metrics.f1_score, labels=[0, 1], zero_division=0.0
  ),
  'matthews': correlation,  # the same of two classes
  'pearson': correlation,
  'spearman': functools.partial(correlation, function=scipy.stats.spearmanr),
}


def compute(
  task: str, logits: Float[np.ndarray, 'N C'], labels: Num[np.ndarray, ' N']
) -> dict[str, float]:
  """Returns the `score` of the `answers` of one head."""
  return score(task, answers(task, logits), labels)


def answers(
  task: str, logits: Float[np.ndarray, 'N C']
) -> Num[np.ndarray, ' N']:
  """Returns class ids, or the numbers of a regression, whose C is 1.

  Raises ValueError if the logits do not fit the task.
  """
  kind = TASKS[task]
  if logits.shape[1] != kind.num_classes:
    expected = f'expected {kind.num_classes} logits of a row'
    raise ValueError(f'{task}: {expected}, got {logits.shape[1]}')
  return logits[:, 0] if kind.is_regression else logits.argmax(-1)


def score(
  task: str, predicted: Num[np.ndarray, ' N'], labels: Num[np.ndarray, ' N']
) -> dict[str, float]:
  """Computes a task's official metrics by name, and the first as `score`.

  Raises InvalidDataError without rows or for an illegal (hidden) label.
  """
  kind = TASKS[task]
  if not len(labels):
    raise InvalidDataError(f'{task}: the split holds no example')
  top = MAX_SCORE if kind.is_regression else kind.num_classes - 1
  predictions.check_labels(labels, top, task)
  names = TASK_METRICS[task]
  values = [float(_METRICS[name](labels, predicted)) for name in names]
  return dict(zip((*names, 'score'), (*values, values[0]), strict=True))


def name_of(task: str, split: str) -> str:
  """Returns GLUE's name of a task's split, such as 'SST-2' or 'MNLI-mm'."""
  if task != 'mnli':
    return TASKS[task].folder
  if split.startswith('ax'):
    return 'AX'
  return 'MNLI-mm' if '_mismatched' in split else 'MNLI-m'


def average(results: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
  """Returns rows: the score of each task, and the average of the leaderboard.

  `results` are metrics by `name_of`. A task with two metrics, and MNLI with two
  splits, counts with their mean (Wang et al., 2019, section 3). Tasks without
  metrics are named as absent; papers also leave out WNLI.
  """
  rows: list[dict[str, Any]] = []
  scores: dict[str, float] = {}
  for task, names in TASK_METRICS.items():
    splits = (name_of(task, split) for split in ('validation', '_mismatched'))
    parts = []
    for name in dict.fromkeys(splits):
      if name in results:
        values = {metric: results[name][metric] for metric in names}
        mean = float(np.mean([*values.values()]))
        parts.append({'task': name} | values | {'score': mean})
    rows += parts
    if parts:
      scores[TASKS[task].folder] = float(np.mean([p['score'] for p in parts]))
  for ending, left_out in (('', ''), (' without WNLI', 'WNLI')):
    tasks = [kind.folder for kind in TASKS.values() if kind.folder != left_out]
    there = [scores[name] for name in tasks if name in scores]
    total = float(np.mean(there)) if there else None
    absent = ', '.join(name for name in tasks if name not in scores)
    rows.append({'task': f'average{ending}', 'score': total, 'absent': absent})
  return rows


def task_of(task: str, dataset: Mapping[str, Any]) -> str:
  """Returns the task if given, else the GLUE task of a data set, or ''."""
  data_task = dataset.get('task', '')
  return task or (data_task if data_task in TASKS else '')


@dataclasses.dataclass(kw_only=True)
class Evaluator(evaluator.Evaluator):
  """The official metrics of the last head on a split; see `compute`."""

  NEEDS_OUTPUTS: ClassVar[bool] = True
  LABELLED: ClassVar[bool] = True  # other rows are left out
  split: evaluator.Split = 'validation'
  task: TaskName = ''  # '' for that of the data set

  def __post_init__(self):
    self._task = task_of(self.task, self.data)
    if not self._task:
      raise ConfigError('task', self.task, f'one of {", ".join(TASKS)}')
    super().__post_init__()
    classes = self.splits['split'].info.num_classes
    if classes != TASKS[self._task].num_classes:
      expected = f'a task with the {classes} classes of {self.split!r}'
      raise ConfigError('task', self._task, expected)

  def run(self, variables: Any) -> dict[str, float]:
    """See `compute`."""
    return score(self._task, *self.answers(variables))

  def metric_names(self, measured):
    """See `evaluator.Evaluator`."""
    return self.METRICS or (*TASK_METRICS[self._task], 'score')

  def answers(self, variables: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns `answers` of the last head and labels, both `[N]`, in order."""
    outputs, labelled = self.context.outputs, self.LABELLED
    rows = self.collect('split', variables, outputs, labelled=labelled)
    return answers(self._task, rows['logits'][:, -1]), rows['label']
