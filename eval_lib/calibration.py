"""Calibration of exit heads: expected calibration error and temperature.

An exit threshold on `max_c P` can be trusted only if the confidence equals the
probability of being right. EAT, section 7.2, measures that by the expected
calibration error (ECE) over 15 equal-width bins and, where it is above 2 %,
scales the head's logits by a temperature (Guo, Pleiss, Sun and Weinberger,
2017, "On Calibration of Modern Neural Networks") before thresholds are swept.
"""

import dataclasses
import json
import pathlib
import zlib
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import numpy as np
import scipy.optimize
import scipy.special
from annotated_types import Interval
from jaxtyping import Bool, Float, Int

from dataset_lib import atomic_file, builder
from dataset_lib.errors import ConfigError
from eval_lib import evaluator, predictions, risk

FILE = 'calibration.json'  # in the directory of a run
BINS = 15
ONLY_ABOVE = 0.02
# On data that the head separates without error the likelihood grows without
# end as the temperature falls, hence the limits.
TEMPERATURES = (0.1, 10.0)
MAX_CONFIDENCES = 4096  # kept of the calibration split

Share = Annotated[float | int, Interval(ge=0.0, le=1.0)]


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
  # In float32 a softmax may exceed 1 by rounding.
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


def errors(
  logits: Float[np.ndarray, 'E N C'],
  labels: Int[np.ndarray, ' N'],
  bins: int = BINS,
  temperatures: Float[np.ndarray, ' E'] | None = None,
) -> list[float]:
  """Returns the ECE of each head."""
  heads = predictions.probabilities(logits, temperatures)
  return [reliability(head, labels, bins).error for head in heads]


def negative_log_likelihood(
  logits: Float[np.ndarray, 'N C'],
  labels: Int[np.ndarray, ' N'],
  temperature: float = 1.0,
) -> float:
  """Averages `-log softmax(logits / temperature)[label]` over rows, in nats."""
  scaled = logits.astype(np.float64) / temperature
  own = np.take_along_axis(scaled, labels[:, None], axis=1)[:, 0]
  return float((scipy.special.logsumexp(scaled, axis=1) - own).mean())


def fit_temperature(
  logits: Float[np.ndarray, 'N C'],
  labels: Int[np.ndarray, ' N'],
  bounds: tuple[float, float] = TEMPERATURES,
) -> float:
  """Returns the temperature in `bounds` of least negative log-likelihood.

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
  """Fits a temperature for each head; 1 where its ECE is <= `only_above`."""
  before = errors(logits, labels, bins)
  return np.array(
    [
      fit_temperature(head, labels) if error > only_above else 1.0
      for head, error in zip(logits, before, strict=True)
    ]
  )


def drift_statistics(
  probabilities: Float[np.ndarray, 'E N C'], threshold: float
) -> dict[str, Any]:
  """Returns the numbers that a drift check compares live traffic with.

  They are of the first head alone, which every row reaches.

  Args:
    probabilities: of all heads, calibrated.
    threshold: of the confidence rule.

  Returns:
    `threshold` and `confidences` of the first head, sorted, as
    `serve_lib.drift.Calibration.from_dict` takes them; of more than
    `MAX_CONFIDENCES` an even sample.
  """
  confidence = np.sort(probabilities[0].max(-1))
  count = min(MAX_CONFIDENCES, len(confidence))
  places = np.linspace(0, len(confidence) - 1, count).round().astype(int)
  return {'threshold': threshold, 'confidences': confidence[places].tolist()}


def fingerprint(variables: Any) -> str:
  """Returns a checksum of parameters, the ones that temperatures belong to.

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


@dataclasses.dataclass(kw_only=True)
class Evaluator(evaluator.Evaluator):
  """ECE of each head before and after temperature; writes calibration.json.

  Temperatures are fitted on `calibration_split`; the ECEs that are reported are
  of `split`. With `epsilon` > 0 a confidence threshold with a guarantee (see
  `eval_lib.risk`) is certified on `split`, which nothing was fitted to: with
  probability 1 - `delta`, at most a share `epsilon` of the answers differ from
  the full model's. The file names the parameters and data, so that it is not
  used for another checkpoint.

  Attributes:
    calibration_split: for temperatures, without rows of `split` or training.
    split: that is reported.
    bins: of the ECE.
    only_above: heads with a smaller ECE keep temperature 1.
    threshold: at which statistics for the drift check are taken.
    epsilon: bound of the guarantee; 0 for none.
    delta: probability with which it may fail.
    layers: of the heads; () for those of the model.
  """

  calibration_split: Annotated[
    evaluator.Split,
    'the name of a split that neither training nor `split` uses, such as '
    "'validation[:50%]' with the split 'validation[50%:]'",
  ]
  split: evaluator.Split = 'validation'
  bins: Annotated[int, Interval(ge=1, le=1000)] = BINS
  only_above: Share = ONLY_ABOVE
  threshold: Share = 0.9
  epsilon: Annotated[float | int, Interval(ge=0.0, le=0.5)] = 0.0
  delta: Annotated[float | int, Interval(ge=1e-6, le=0.5)] = 0.1
  layers: predictions.Layers = ()

  def __post_init__(self):
    if self.split == self.calibration_split:
      raise ConfigError(
        'calibration_split',
        self.calibration_split,
        'another split than `split`: what was fitted cannot judge itself',
      )
    self.layers = self.layers or self.context.layers
    self._reported, self._fitted = predictions.open_splits(self)
    if self.epsilon:
      predictions.check_untrained(self._reported, 'split', self)

  def run(self, variables: Any) -> dict[str, float]:
    """Fits, measures and writes `calibration.json` into the workdir.

    Returns:
      For every head (`layer_4`, or `head_1` without `layers`):
      `ece_<head>`, `ece_calibrated_<head>`, `temperature_<head>`; with
      `epsilon` also `guaranteed_early` (share of the rows that leave before
      the last head) and, if one was certified, `guaranteed_threshold`.
    """
    logits, labels = predictions.labelled_logits(
      self._fitted, self.calibration_split, variables, self.context
    )
    temperatures = fit_temperatures(logits, labels, self.bins, self.only_above)
    report = {
      'parameters': fingerprint(variables),
      'dataset': builder.validate(self.dataset or self.context.dataset),
      'calibration_split': self.calibration_split,
      'calibration_rows': len(labels),
      'calibration_ece': errors(logits, labels, self.bins),
      'temperatures': temperatures.tolist(),
      'drift': drift_statistics(
        predictions.probabilities(logits, temperatures), float(self.threshold)
      ),
    }
    logits, labels = predictions.labelled_logits(
      self._reported, self.split, variables, self.context
    )
    heads = predictions.probabilities(logits, temperatures)
    report |= {
      'split': self.split,
      'rows': len(labels),
      'layers': predictions.layers_of(self.layers, len(logits)),
      'bins': self.bins,
      'ece': errors(logits, labels, self.bins),
      'ece_calibrated': errors(logits, labels, self.bins, temperatures),
      'guarantee': self._certify(heads) if self.epsilon else None,
    }
    if self.context.workdir and jax.process_index() == 0:
      path = pathlib.Path(self.context.workdir) / FILE
      lines = json.dumps(report, indent=2, allow_nan=False)
      atomic_file.write_text(path, lines + '\n')
    return self._metrics(report)

  def _certify(self, heads: Float[np.ndarray, 'E N C']) -> dict[str, Any]:
    guarantee, early = risk.certify_confidence(
      heads, float(self.epsilon), float(self.delta)
    )
    certified = dataclasses.asdict(guarantee)
    return {'loss': 'disagreement', 'early': early} | certified

  def _metrics(self, report: Mapping[str, Any]) -> dict[str, float]:
    heads = len(report['temperatures'])
    names = predictions.head_names(self.layers, heads)
    result: dict[str, float] = {}
    for place, name in enumerate(names):
      result |= {
        f'ece_{name}': report['ece'][place],
        f'ece_calibrated_{name}': report['ece_calibrated'][place],
        f'temperature_{name}': report['temperatures'][place],
      }
    if report['guarantee']:
      result['guaranteed_early'] = report['guarantee']['early']
      if report['guarantee']['threshold'] is not None:
        result['guaranteed_threshold'] = report['guarantee']['threshold']
    return result
