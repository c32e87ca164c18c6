"""Calibration of exit heads: expected calibration error and temperature.

An exit threshold on `max_c P` means what it says only if the confidence is the
probability of being right. EAT, section 7.2, measures that by the expected
calibration error (ECE) over 15 equal-width bins and, where it is above 2 %,
scales the head's logits by a temperature (Guo, Pleiss, Sun and Weinberger,
2017, "On Calibration of Modern Neural Networks") before thresholds are swept.
"""

import dataclasses
import zlib
from typing import Any

import jax
import numpy as np
import scipy.optimize
import scipy.special
from jaxtyping import Bool, Float, Int

from eval_lib import evaluator, predictions

FILE = 'calibration.json'  # in the directory of a run
BINS = 15
ONLY_ABOVE = 0.02

# Temperatures are sought in this range. On data that the head separates
# without error the likelihood grows without end as the temperature falls.
TEMPERATURES = (0.1, 10.0)

MAX_CONFIDENCES = 4096  # kept of the calibration split


@dataclasses.dataclass(frozen=True)
class Reliability:
  """A reliability diagram in numbers: M equal-width bins of confidence.

  Bin b holds the confidences in (b / M, (b + 1) / M]; the first one also 0.

  Attributes:
    count: rows in each bin.
    confidence: mean confidence of each bin, NaN where it is empty.
    accuracy: share of right answers of each bin, NaN where it is empty.
  """

  count: Int[np.ndarray, ' M']
  confidence: Float[np.ndarray, ' M']
  accuracy: Float[np.ndarray, ' M']

  @property
  def edges(self) -> np.ndarray:
    """Float `[M + 1]`, from 0 to 1."""
    return np.linspace(0.0, 1.0, len(self.count) + 1)

  @property
  def error(self) -> float:
    """ECE, EAT's equation in section 7.2: in [0, 1]; empty bins add 0."""
    full = self.count > 0
    gaps = np.abs(self.accuracy[full] - self.confidence[full])
    return float((self.count[full] * gaps).sum() / self.count.sum())


def reliability(
  probabilities: Float[np.ndarray, 'N C'],
  labels: Int[np.ndarray, ' N'],
  bins: int = BINS,
  mask: Float[np.ndarray, ' N'] | Bool[np.ndarray, ' N'] | None = None,
) -> Reliability:
  """Sorts rows into bins of their confidence `max_c P`.

  Args:
    probabilities: of one head.
    labels: the right classes.
    bins: number of bins.
    mask: rows with mask 0 never count, whatever they hold; None counts all.

  Raises:
    ValueError: no row counts, or the confidences are not in [0, 1].
  """
  if mask is not None:
    probabilities, labels = probabilities[mask > 0], labels[mask > 0]
  confidence = probabilities.max(-1).astype(np.float64)
  # In float32 a softmax may pass 1 by rounding.
  if not len(labels) or not ((confidence >= 0) & (confidence < 1.001)).all():
    raise ValueError(
      'probabilities: expected at least one row, in [0, 1], got '
      f'{len(labels)} rows: {confidence}'
    )
  right = probabilities.argmax(-1) == labels
  edges = np.linspace(0.0, 1.0, bins + 1)
  place = np.searchsorted(edges, confidence, side='left') - 1
  place = place.clip(0, bins - 1)
  count = np.bincount(place, minlength=bins)

  def mean(values):
    total = np.bincount(place, values, minlength=bins)
    empty = np.full(bins, np.nan)
    return np.divide(total, count, out=empty, where=count > 0)

  return Reliability(count, mean(confidence), mean(right.astype(np.float64)))


def expected_calibration_error(
  probabilities: Float[np.ndarray, 'N C'],
  labels: Int[np.ndarray, ' N'],
  bins: int = BINS,
  mask: Float[np.ndarray, ' N'] | Bool[np.ndarray, ' N'] | None = None,
) -> float:
  """`sum_b |S_b| / n |acc(S_b) - conf(S_b)|`; see `reliability`."""
  return reliability(probabilities, labels, bins, mask).error


def negative_log_likelihood(
  logits: Float[np.ndarray, 'N C'],
  labels: Int[np.ndarray, ' N'],
  temperature: float = 1.0,
) -> float:
  """Mean over the rows of `-log softmax(logits / temperature)[label]`, nats."""
  scaled = logits.astype(np.float64) / temperature
  own = np.take_along_axis(scaled, labels[:, None], axis=1)[:, 0]
  return float((scipy.special.logsumexp(scaled, axis=1) - own).mean())


def fit_temperature(
  logits: Float[np.ndarray, 'N C'],
  labels: Int[np.ndarray, ' N'],
  bounds: tuple[float, float] = TEMPERATURES,
) -> float:
  """The temperature in `bounds` of least negative log-likelihood.

  That is convex in 1 / T, so a bounded search over log T finds the minimum. It
  is never worse than T = 1, which is kept where nothing is better.
  """
  low, high = bounds
  found = scipy.optimize.minimize_scalar(
    lambda log: negative_log_likelihood(logits, labels, float(np.exp(log))),
    bounds=(np.log(low), np.log(high)),
    method='bounded',
    options={'xatol': 1e-7},
  )
  candidates = (1.0, float(np.exp(found.x)), low, high)
  return min(
    candidates, key=lambda t: negative_log_likelihood(logits, labels, t)
  )


def fit_temperatures(
  logits: Float[np.ndarray, 'E N C'],
  labels: Int[np.ndarray, ' N'],
  bins: int = BINS,
  only_above: float = ONLY_ABOVE,
) -> Float[np.ndarray, ' E']:
  """A temperature for each head; 1 where its ECE is at most `only_above`."""
  before = errors(logits, labels, bins)
  return np.array(
    [
      fit_temperature(head, labels) if error > only_above else 1.0
      for head, error in zip(logits, before, strict=True)
    ]
  )


def errors(
  logits: Float[np.ndarray, 'E N C'],
  labels: Int[np.ndarray, ' N'],
  bins: int = BINS,
  temperatures: Float[np.ndarray, ' E'] | None = None,
) -> list[float]:
  """The ECE of each head."""
  heads = predictions.probabilities(logits, temperatures)
  return [expected_calibration_error(head, labels, bins) for head in heads]


def drift_statistics(
  probabilities: Float[np.ndarray, 'E N C'], threshold: float
) -> dict[str, Any]:
  """What a drift check compares live traffic with; plain lists for JSON.

  Of the first head alone, which every row reaches, whatever leaves where.

  Args:
    probabilities: of all heads, calibrated.
    threshold: of the confidence rule.

  Returns:
    `threshold` and `confidences` of the first head, sorted, as
    `serve_lib.drift.Calibration.from_dict` takes them; of more than
    `MAX_CONFIDENCES` an even sample.
  """
  confidence = probabilities[0].max(-1)
  return {
    'threshold': threshold,
    'confidences': _even_sample(confidence, MAX_CONFIDENCES).tolist(),
  }


def _even_sample(
  values: Float[np.ndarray, ' N'], limit: int
) -> Float[np.ndarray, ' M']:
  """The values in their order; of more than `limit` evenly spaced ones."""
  count = min(limit, len(values))
  places = np.linspace(0, len(values) - 1, count).round().astype(int)
  return np.sort(values)[places]


def fingerprint(variables: Any) -> str:
  """Tells apart parameters: temperatures hold for those they were fitted to.

  Over all processes together; the same however the arrays are sharded.

  Args:
    variables: a pytree of arrays.
  """
  crc = 0
  for leaf in jax.tree.leaves(variables):
    # One at a time: a host need not hold all of a large model twice.
    array = np.asarray(evaluator.gather(leaf))
    crc = zlib.crc32(f'{array.dtype}{array.shape}'.encode(), crc)
    crc = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, crc)
  return f'crc32:{crc:08x}'
