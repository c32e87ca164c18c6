"""The guarantee of a threshold, tried on the recorded rows of a report."""

from typing import Any

import numpy as np

from dataset_lib.errors import InvalidDataError
from eval_lib import predictions, risk
from launch.eat_report.models import Model


def resampled(
  model: Model,
  labels: np.ndarray,
  judged: np.ndarray,
  epsilon: float,
  delta: float,
  draws: int,
) -> list[dict[str, Any]]:
  """How often thresholds with a guarantee fail on resampled rows.

  Once for the disagreement with the full model and once for the harm, the
  rows that it has right and the early exit wrong. Every draw calibrates on as
  many rows as are judged (see `eval_lib.risk.resampled_risk`).

  Args:
    model: with its logits.
    labels: `[N]`.
    judged: `[N]`, true for the rows that its temperatures were not fitted to;
      only these count.
    epsilon: bound on the risk.
    delta: how often the bound may fail.
    draws: resamplings.

  Raises:
    InvalidDataError: a regression, a model without exits, or no rows.
  """
  if model.logits.shape[-1] == 1 or len(model.heads) == 1:
    raise InvalidDataError(
      f'--guarantee: {model.run.directory} has no exits by confidence to give '
      'a guarantee for'
    )
  if not judged.any():
    raise InvalidDataError(
      f'--guarantee: the temperatures of {model.run.directory} were fitted to '
      f'all {len(judged)} rows, and a guarantee needs others; give them as '
      '--split'
    )
  logits, labels = model.logits[:, judged], labels[judged]
  heads = predictions.probabilities(model.calibrated[:, judged])
  thresholds = risk.default_thresholds(heads.shape[-1])
  leaves = risk.confidence_exits(heads, thresholds)
  result = []
  for name, losses in (
    ('disagreement', risk.disagreement(logits, leaves)),
    ('harm', risk.harm(logits, leaves, labels)),
  ):
    risks = risk.resampled_risk(
      losses, thresholds, epsilon, delta, rows=len(labels), draws=draws
    )
    found = risk.guaranteed_threshold(losses, thresholds, epsilon, delta)
    early = 0.0
    if found.threshold is not None:
      early = (leaves[found.certified - 1] < len(heads) - 1).mean()
    result.append(
      {
        'loss': name,
        'epsilon': epsilon,
        'delta': delta,
        'rows': len(labels),
        'draws': draws,
        'exceeded': float((risks > epsilon).mean()),
        'worst': float(risks.max()),
        'mean': float(risks.mean()),
        'threshold': found.threshold,
        'early': float(early),
      }
    )
  return result
