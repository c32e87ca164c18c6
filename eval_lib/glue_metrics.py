"""The official metrics of the nine GLUE tasks, over a whole split.

GLUE (Wang et al., 2018, table 1). F1 and the correlations are no means over
rows, so the predictions of the split are collected first. Where a metric is
not defined it is 0 and never NaN: Matthews' correlation of constant
predictions (scikit-learn's convention as well), F1 without a positive, and
Pearson's and Spearman's correlation of constant predictions (where scipy says
NaN): they predict nothing of the label.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import scipy.stats
import sklearn.metrics
from jaxtyping import Float, Int, Num

from dataset_lib.errors import ConfigError, InvalidDataError
from dataset_lib.fields import Field, text
from dataset_lib.glue_tasks import MAX_SCORE, TASKS
from eval_lib import evaluator, predictions

# Names in `METRICS`. For some the leaderboard averages two; here, as in the
# papers, the main number is the first: of MRPC and QQP F1, of STS-B Pearson's.
TASK_METRICS = {
  'cola': ('matthews',),
  'sst2': ('accuracy',),
  'mrpc': ('f1', 'accuracy'),
  'qqp': ('f1', 'accuracy'),
  'stsb': ('pearson', 'spearman'),
  'mnli': ('accuracy',),
  'qnli': ('accuracy',),
  'rte': ('accuracy',),
  'wnli': ('accuracy',),
}


def accuracy(
  predicted: Int[np.ndarray, ' N'], labels: Int[np.ndarray, ' N']
) -> float:
  """Share of right answers in [0, 1]."""
  return float(sklearn.metrics.accuracy_score(labels, predicted))


def f1(
  predicted: Int[np.ndarray, ' N'], labels: Int[np.ndarray, ' N']
) -> float:
  """Harmonic mean of precision and recall of class 1; 0 if both are."""
  score = sklearn.metrics.f1_score(
    labels, predicted, labels=[0, 1], pos_label=1, zero_division=0.0
  )
  return float(score)


def matthews(
  predicted: Int[np.ndarray, ' N'], labels: Int[np.ndarray, ' N']
) -> float:
  """Matthews' correlation in [-1, 1]; 0 if predictions or labels are equal."""
  if _constant(predicted) or _constant(labels):
    return 0.0
  return float(sklearn.metrics.matthews_corrcoef(labels, predicted))


def pearson(
  predicted: Float[np.ndarray, ' N'], labels: Float[np.ndarray, ' N']
) -> float:
  """Linear correlation in [-1, 1]; 0 if predictions or labels are equal."""
  if _constant(predicted) or _constant(labels):
    return 0.0
  return float(scipy.stats.pearsonr(predicted, labels).statistic)


def spearman(
  predicted: Float[np.ndarray, ' N'], labels: Float[np.ndarray, ' N']
) -> float:
  """Rank correlation in [-1, 1]; 0 if predictions or labels are equal."""
  if _constant(predicted) or _constant(labels):
    return 0.0
  return float(scipy.stats.spearmanr(predicted, labels).statistic)


METRICS: dict[str, Callable[..., float]] = {
  'accuracy': accuracy,
  'f1': f1,
  'matthews': matthews,
  'pearson': pearson,
  'spearman': spearman,
}


def _constant(values: np.ndarray) -> bool:
  return bool((values == values[0]).all())


def compute(
  task: str, logits: Float[np.ndarray, 'N C'], labels: Num[np.ndarray, ' N']
) -> dict[str, float]:
  """A task's official metrics.

  Args:
    task: a name in `TASKS`.
    logits: of one head; of a regression the predicted numbers, `[N, 1]`.
    labels: classes as integers, or numbers of a regression.

  Returns:
    The metrics by name, and `score`: the first of `TASK_METRICS[task]`.

  Raises:
    InvalidDataError: there is no row, or a label is not legal, as in GLUE's
      test splits, whose labels are hidden.
    ValueError: the logits do not fit the task.
  """
  kind = TASKS[task]
  if logits.shape[1] != kind.num_classes:
    raise ValueError(
      f'{task}: expected {kind.num_classes} logits of a row, got '
      f'{logits.shape[1]}'
    )
  if not len(labels):
    raise InvalidDataError(f'{task}: the split holds no example')
  if kind.is_regression:
    _check_similarities(task, labels)
    predicted = logits[:, 0].astype(np.float64)
    labels = labels.astype(np.float64)
  else:
    predictions.check_labels(labels, kind.num_classes, task)
    predicted = logits.argmax(-1)
  names = TASK_METRICS[task]
  values = {name: METRICS[name](predicted, labels) for name in names}
  return values | {'score': values[names[0]]}


def _check_similarities(task: str, labels: Num[np.ndarray, ' N']) -> None:
  if not ((labels >= 0) & (labels <= MAX_SCORE)).all():
    raise InvalidDataError(
      f'{task}: expected labels in [0, {MAX_SCORE}], got '
      f'{labels.min()} to {labels.max()}; labels that are hidden cannot be '
      'evaluated against'
    )


# The field by which an evaluator learns the task.
TASK = Field(
  f"one of {', '.join(TASKS)}, or '' for the data set's own",
  lambda value: value == '' or (isinstance(value, str) and value in TASKS),
  '',
)


def task_of(config: Mapping[str, Any]) -> str:
  """The GLUE task that a complete configuration names, or ''."""
  own = dict(config['dataset'].items()).get('task', '')
  return config['task'] or (own if own in TASKS else '')


class Evaluator:
  """The official metrics of the last head on a split.

  Configuration: `split`, `task` if the data set does not name it, and
  `dataset` if not the run's own. The result is that of `compute`.
  """

  FIELDS: ClassVar[Mapping[str, Field]] = {
    'split': text('the name of a split', 'validation'),
    'task': TASK,
    'dataset': evaluator.DATASET,
  }

  def __init__(self, config: Mapping[str, Any], context: evaluator.EvalContext):
    self._context = context
    self._task = task_of(config)
    if not self._task:
      raise ConfigError('task', config['task'], f'one of {", ".join(TASKS)}')
    self._dataset = evaluator.build_dataset(
      config['dataset'], config['split'], context
    )
    classes = self._dataset.info.num_classes
    if classes != TASKS[self._task].num_classes:
      raise ConfigError(
        'task',
        self._task,
        f'a task with the {classes} classes of split {config["split"]!r}',
      )

  def run(self, variables: Any) -> dict[str, float]:
    """See `compute`."""
    rows = predictions.collect(self._dataset, variables, self._context)
    return compute(self._task, rows['logits'][:, -1], rows['label'])
