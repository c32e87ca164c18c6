"""The guarantee of a threshold, tried on the recorded rows of a report."""

from typing import Any

import numpy as np

from dataset_lib.errors import InvalidDataError
from eval_lib import predictions, risk
from launch.eat_report.models import Model


def resampled(
  model: Model, labels: np.ndarray, epsilon: float, delta: float, draws: int
) -> list[dict[str, Any]]:
  """How often thresholds with a guarantee fail on resampled rows.

  Once for the disagreement with the full model and once for the harm, the
  rows that it has right and the early exit wrong. Every draw calibrates on as
  many rows as there are (see `eval_lib.risk.resampled_risk`).

  Raises:
    InvalidDataError: a regression, or a model without exits.
  """
  if model.logits.shape[-1] == 1 or len(model.heads) == 1:
    raise InvalidDataError(
      f'--guarantee: {model.run.directory} has no exits by confidence to give '
      'a guarantee for'
    )
  heads = predictions.probabilities(model.calibrated)
  thresholds = risk.default_thresholds(heads.shape[-1])
  leaves = risk.confidence_exits(heads, thresholds)
  result = []
  for name, losses in (
    ('disagreement', risk.disagreement(model.logits, leaves)),
    ('harm', risk.harm(model.logits, leaves, labels)),
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
