"""What an EAT report calls quality and agreement, by the run's task."""

from collections.abc import Callable
from typing import Any

import numpy as np

from eval_lib import frontier, glue
from launch.eat_report.models import Run


def of(
  run: Run,
) -> tuple[str, Callable[[Any, Any], float], Callable[[Any, Any], float]]:
  """(name, quality, agreement): the official metric, and that of answers.

  Two regressions agree by their correlation.
  """
  task = glue.task_of('', run.config.dataset)
  if run.task.info.num_classes == 1:
    return (
      'pearson',
      _correlation,
      lambda one, full: _correlation(one, full[:, 0]),
    )
  if not task:
    return 'accuracy', frontier.accuracy, frontier.same_class
  metric = glue.TASK_METRICS[task][0]

  def quality(logits, labels):
    return glue.compute(task, logits, labels)['score']

  return metric, quality, frontier.same_class


def _correlation(logits: Any, labels: Any) -> float:
  return glue.pearson(
    logits[:, 0].astype(np.float64), labels.astype(np.float64)
  )
