"""Exit rules as pure functions of NumPy arrays, row by row.

EAT, section 3.3 (`max_c P >= tau`, patience), with the entropy of DeeBERT and
the patience of PABEE.
"""

import dataclasses
import math
from typing import Annotated, Any

import numpy as np
import scipy.special
from annotated_types import Interval, Predicate
from jaxtyping import Bool, Float, Int

from core.errors import check_option
from eval_lib.probabilities import margin, softmax

RULES_WITH_TAU = ('confidence', 'entropy', 'margin', 'combined')
RULES = (*RULES_WITH_TAU, 'patience', 'never')


def _is_threshold(value: Any) -> bool:
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  return value is None or (is_number and not math.isnan(value))


Threshold = Annotated[Any, Predicate(_is_threshold), 'a number or None']


@dataclasses.dataclass(frozen=True)
class Rule:
  """A condition for a row to exit at a head with probabilities P.

  - 'confidence': `max_c P >= tau`.
  - 'entropy': `-sum_c P log P <= tau`, in nats.
  - 'margin': the largest P minus the second is at least tau.
  - 'patience': the last `patience` heads, up to this one, have the same argmax.
  - 'combined': both 'confidence' and 'patience'.
  - 'never': only at the last head.

  A regression (one logit) exits, unless 'never', if among the last
  `max(2, patience)` predictions all consecutive predictions differ by less than
  `tolerance`. The three thresholds may be arrays `[B]`, one for each row.
  Options of a family check their ranges.
  """

  name: str
  # A probability, a difference of two, or nats; inf (-inf for 'entropy')
  # disables exits.
  tau: Threshold = None
  patience: Annotated[int, Interval(ge=1)] = 2  # number of heads
  tolerance: Threshold = 0.1  # of a regression, in the unit of the label
  # Rows with a smaller margin never exit early; not for a regression.
  veto_margin: Threshold = 0.0

  def __post_init__(self):
    check_option('name', self.name, RULES)


def should_exit(
  rule: Rule, logits: Float[np.ndarray, 'E B C']
) -> Bool[np.ndarray, ' B']:
  """Returns True for rows that exit at the last of the E heads so far.

  Logits are calibrated; C = 1 is a regression. Rows with logits that are not
  finite do not exit.
  """
  if rule.name == 'never':
    return np.zeros(logits.shape[1], bool)
  with np.errstate(invalid='ignore'):
    if logits.shape[2] == 1:
      return _settled(rule, logits[..., 0])
    return _decided(rule, logits)


def heads_needed(rule: Rule, is_regression: bool) -> int | None:
  """Returns the number of heads before a row can exit; None for 'never'."""
  if rule.name == 'never':
    return None
  if is_regression:
    return max(2, rule.patience)
  return rule.patience if rule.name in ('patience', 'combined') else 1


def first_exit(
  rule: Rule, logits: Float[np.ndarray, 'E B C']
) -> Int[np.ndarray, ' B']:
  """Returns the index of the head at which each row exits, of all heads."""
  counts = range(1, len(logits))
  decided = [should_exit(rule, logits[:count]) for count in counts]
  return np.array([*decided, np.ones(logits.shape[1], bool)]).argmax(0)


def _decided(rule: Rule, logits: Any) -> Any:
  """Applies the rule of a classification at the last head."""
  probabilities, like = softmax(logits[-1]), logits.dtype.type
  certainty = margin(probabilities)
  # The comparison is False for NaN; equal classes would let NaN pass.
  decided = certainty >= like(rule.veto_margin)
  if rule.name in ('confidence', 'combined'):
    decided &= probabilities.max(-1) >= like(rule.tau)
  if rule.name == 'entropy':
    entropy = scipy.special.entr(probabilities).sum(-1)
    decided &= entropy <= like(rule.tau)
  if rule.name == 'margin':
    decided &= certainty >= like(rule.tau)
  if rule.name in ('patience', 'combined'):
    classes = logits[-rule.patience :].argmax(-1)
    decided &= (classes == classes[-1]).all(0) & (len(logits) >= rule.patience)
  return decided


def _settled(rule: Rule, predictions: Any) -> Any:
  """Returns True for rows whose last predictions differ by < tolerance."""
  count = max(2, rule.patience)
  if len(predictions) < count:
    return np.zeros(predictions.shape[1], bool)
  # The largest is NaN if one is.
  largest = np.abs(np.diff(predictions[-count:], axis=0)).max(0)
  return largest < predictions.dtype.type(rule.tolerance)
