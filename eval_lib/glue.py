"""The official metrics of the nine GLUE tasks, over a whole split.

GLUE (Wang et al., 2019, table 1), by scikit-learn and scipy. An undefined
metric is 0 and never NaN: F1 without a positive, and the correlations of
constant predictions.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import scipy.stats
import sklearn.metrics
from jaxtyping import Float, Num

from dataset_lib.errors import ConfigError, InvalidDataError
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
  """Computes a task's official metrics by name, and the first as `score`.

  `logits` are of one head; for a regression, `[N, 1]` are the predictions.
  Raises InvalidDataError without rows or for an illegal (hidden) label, and
  ValueError if the logits do not fit the task.
  """
  kind = TASKS[task]
  if logits.shape[1] != kind.num_classes:
    expected = f'expected {kind.num_classes} logits of a row'
    raise ValueError(f'{task}: {expected}, got {logits.shape[1]}')
  if not len(labels):
    raise InvalidDataError(f'{task}: the split holds no example')
  top = MAX_SCORE if kind.is_regression else kind.num_classes - 1
  if not ((labels >= 0) & (labels <= top)).all():
    raise InvalidDataError(
      f'{task}: expected labels in [0, {top}], got {labels.min()} to '
      f'{labels.max()}; labels that are hidden cannot be evaluated against'
    )
  predicted = logits[:, 0] if kind.is_regression else logits.argmax(-1)
  names = TASK_METRICS[task]
  values = [float(_METRICS[name](labels, predicted)) for name in names]
  return dict(zip((*names, 'score'), (*values, values[0]), strict=True))


def task_of(task: str, dataset: Mapping[str, Any]) -> str:
  """Returns the task if given, else the GLUE task of a data set, or ''."""
  own = dataset.get('task', '')
  return task or (own if own in TASKS else '')


@dataclasses.dataclass(kw_only=True)
class Evaluator(evaluator.Evaluator):
  """The official metrics of the last head on a split; see `compute`."""

  NEEDS_OUTPUTS: ClassVar[bool] = True
  split: evaluator.Split = 'validation'
  task: TaskName = ''  # '' for that of the data set

  def __post_init__(self):
    self._task = task_of(self.task, self.data)
    if not self._task:
      raise ConfigError('task', self.task, f'one of {", ".join(TASKS)}')
    self._data = self.open(self.split)
    classes = self._data.info.num_classes
    if classes != TASKS[self._task].num_classes:
      expected = f'a task with the {classes} classes of {self.split!r}'
      raise ConfigError('task', self._task, expected)

  def run(self, variables: Any) -> dict[str, float]:
    """See `compute`."""
    context = self.context
    rows = predictions.collect(
      self._data, variables, context.outputs, context.put
    )
    return compute(self._task, rows['logits'][:, -1], rows['label'])
