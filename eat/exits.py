"""Exit rules as pure functions, row by row.

EAT, section 3.3 (`max_c P >= tau`, patience), with the entropy of DeeBERT and
the patience of PABEE. All functions take NumPy arrays (on the host, in serving)
and JAX arrays (in a sweep).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from model_lib.errors import FieldError
from serve_lib.decisions import entropy, scale, softmax

RULES_WITH_TAU = ('confidence', 'entropy', 'margin', 'combined')
RULES = (*RULES_WITH_TAU, 'patience', 'never')


@dataclasses.dataclass(frozen=True)
class Rule:
  """A condition for a row to exit at a head with probabilities P.

  - 'confidence': `max_c P >= tau`.
  - 'entropy': `-sum_c P log P <= tau`, in nats.
  - 'margin': the largest P minus the second is at least tau.
  - 'patience': the last `patience` heads, up to this one, have the same argmax.
  - 'combined': both 'confidence' and 'patience'.
  - 'never': only at the last head.

  A regression (one logit) exits, unless 'never', when each of the last
  `max(2, patience)` predictions differs by less than `tolerance` from the one
  before. The three thresholds may be arrays `[B]`, one for each row. Illegal
  values raise FieldError.
  """

  name: str
  # A probability, a difference of two, or nats. Infinity, for entropy minus
  # infinity, is never met.
  tau: Any = None
  patience: Any = 2  # number of heads
  tolerance: Any = 0.1  # of a regression, in the unit of the label
  # Rows with a smaller margin never exit early; not for a regression.
  veto_margin: Any = 0.0

  def __post_init__(self):
    if self.name not in RULES:
      raise FieldError('name', self.name, f'one of {RULES}')
    if self.name == 'entropy':
      expected = 'nats >= 0, or -inf for never'
      _check('tau', self.tau, expected, lambda t: (t >= 0) | (t == -np.inf))
    elif self.name in RULES_WITH_TAU:
      expected = 'a probability in [0, 1], or inf for never'
      _check('tau', self.tau, expected, lambda t: _in_unit(t) | (t == np.inf))
    patience = self.patience
    if isinstance(patience, bool) or not (
      isinstance(patience, (int, np.integer)) and patience >= 1
    ):
      raise FieldError('patience', patience, 'an integer >= 1')
    _check('tolerance', self.tolerance, 'a number >= 0', lambda t: t >= 0)
    expected = 'a probability in [0, 1]'
    _check('veto_margin', self.veto_margin, expected, _in_unit)


def should_exit(
  rule: Rule,
  logits: Float[Any, 'E B C'] | Sequence[Float[Any, 'B C']],
) -> Bool[Any, ' B']:
  """Returns True for rows that exit at the last of the E heads so far.

  Logits are calibrated; C = 1 is a regression. Rows with logits that are not
  finite do not exit.
  """
  xp, heads = _stacked(logits)
  if rule.name == 'never':
    return xp.zeros(heads.shape[1:2], bool)
  with np.errstate(invalid='ignore'):
    if heads.shape[2] == 1:
      return _settled(xp, rule, heads[..., 0])
    return _decided(xp, rule, heads)


def reason(rule: Rule, is_regression: bool) -> str:
  """Returns the name of an early exit: the rule's, or 'tolerance'."""
  return 'tolerance' if is_regression and rule.name != 'never' else rule.name


def heads_needed(rule: Rule, is_regression: bool) -> int | None:
  """Returns the number of heads before a row can exit; None for 'never'."""
  if rule.name == 'never':
    return None
  if is_regression:
    return max(2, rule.patience)
  return rule.patience if rule.name in ('patience', 'combined') else 1


def first_exit(
  rule: Rule,
  logits: Float[Any, 'E B C'] | Sequence[Float[Any, 'B C']],
) -> Int[Any, ' B']:
  """Returns the index of the head at which each row exits, of all heads."""
  xp, heads = _stacked(logits)
  decided = [
    should_exit(rule, heads[: count + 1]) for count in range(len(heads) - 1)
  ]
  decided.append(xp.ones(heads.shape[1:2], bool))
  return xp.stack(decided).argmax(0).astype(xp.int32)


def calibrate(
  logits: Float[Any, 'E B C'], temperatures: Float[Any, ' E'] | Sequence[float]
) -> Float[Any, 'E B C']:
  """Divides the logits of each head by its temperature (Guo et al. 2017).

  Raises:
    FieldError: if there is not one for each head, or one is not positive.
  """
  _, heads = _stacked(logits)
  if len(temperatures) != len(heads):
    raise FieldError(
      'temperatures', len(temperatures), f'{len(heads)}, one for each head'
    )
  expected = 'finite numbers > 0'
  _check(
    'temperatures', temperatures, expected, lambda t: (t > 0) & (t < np.inf)
  )
  return scale(heads, temperatures)


def probabilities(
  logits: Float[Any, 'E B C'], temperatures: Float[Any, ' E'] | Sequence[float]
) -> Float[Any, 'E B C']:
  """Returns the class probabilities of all heads; see `calibrate`."""
  heads = calibrate(logits, temperatures)
  if heads.shape[2] < 2:
    raise FieldError('logits', 1, 'at least 2 classes')
  return softmax(heads)


def _stacked(logits: Any) -> tuple[Any, Any]:
  """Returns the array module, and the logits as float `[E, B, C]`."""
  heads = logits if hasattr(logits, 'ndim') else list(logits)
  parts = heads if isinstance(heads, list) else [heads]
  xp = jnp if any(isinstance(part, jax.Array) for part in parts) else np
  stacked = xp.stack(heads) if isinstance(heads, list) else heads
  if stacked.dtype not in (np.float32, np.float64):
    stacked = stacked.astype(np.float32)
  return xp, stacked


def _like(xp: Any, threshold: Any, logits: Any) -> Any:
  """Casts a threshold to the dtype of the logits."""
  return xp.asarray(threshold, logits.dtype)


def _decided(xp: Any, rule: Rule, heads: Any) -> Any:
  """Applies the rule of a classification at the last head."""
  probability = softmax(heads[-1])
  ordered = xp.sort(probability, axis=-1)
  margin = ordered[..., -1] - ordered[..., -2]
  # False for NaN, which the agreement of classes would let pass.
  decided = margin >= _like(xp, rule.veto_margin, heads)
  if rule.name in ('confidence', 'combined'):
    decided &= ordered[..., -1] >= _like(xp, rule.tau, heads)
  if rule.name == 'entropy':
    decided &= entropy(heads[-1]) <= _like(xp, rule.tau, heads)
  if rule.name == 'margin':
    decided &= margin >= _like(xp, rule.tau, heads)
  if rule.name in ('patience', 'combined'):
    decided &= _agreed(xp, heads, rule.patience)
  return decided


def _agreed(xp: Any, heads: Any, patience: int) -> Any:
  """Returns True for rows whose last heads have the same argmax."""
  if len(heads) < patience:
    return xp.zeros(heads.shape[1:2], bool)
  classes = heads[-patience:].argmax(-1)
  return (classes == classes[-1:]).all(0)


def _settled(xp: Any, rule: Rule, predictions: Any) -> Any:
  """Returns True for rows whose last predictions differ by < tolerance."""
  count = max(2, rule.patience)
  if len(predictions) < count:
    return xp.zeros(predictions.shape[1:], bool)
  last = predictions[-count:]
  # The largest is NaN if one is.
  largest = xp.abs(last[1:] - last[:-1]).max(0)
  return largest < _like(xp, rule.tolerance, last)


def _in_unit(values: Any) -> Any:
  return (values >= 0) & (values <= 1)


def _check(name: str, value: Any, expected: str, legal: Any) -> None:
  """Raises FieldError unless all values are legal; traced ones pass."""
  if isinstance(value, jax.core.Tracer):
    return
  values = np.asarray(value)
  # V is bfloat16; None and True are no numbers.
  is_number = values.dtype.kind in 'fiuV' and values.ndim <= 1
  if not is_number or not np.all(legal(values.astype(np.float64))):
    raise FieldError(name, value, expected)
