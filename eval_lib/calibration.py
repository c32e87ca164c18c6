"""Calibration of exit heads: expected calibration error and temperature.

An exit threshold on `max_c P` means what it says only if the confidence is the
probability of being right. EAT, section 7.2, measures that by the expected
calibration error (ECE) over 15 equal-width bins and, where it is above 2 %,
scales the head's logits by a temperature (Guo, Pleiss, Sun and Weinberger,
2017, "On Calibration of Modern Neural Networks") before thresholds are swept.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
import scipy.optimize
import scipy.special
from jaxtyping import Bool, Float, Int

from dataset_lib.errors import ConfigError
from dataset_lib.fields import Field, integer, real, text
from eval_lib import evaluator, predictions, risk
from serve_lib import drift

BINS = 15
ONLY_ABOVE = 0.02

# Temperatures are sought in this range. On data that the head separates
# without error the likelihood grows without end as the temperature falls.
TEMPERATURES = (0.1, 10.0)

# Levels of the quantiles of confidence that a drift check compares with.
QUANTILES = tuple(round(0.05 * i, 2) for i in range(21))

FILE = 'calibration.json'


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
  probabilities: Float[np.ndarray, 'E N C'],
  threshold: float,
  layers: Sequence[int],
) -> dict[str, Any]:
  """What a drift check compares live traffic with; plain lists for JSON.

  Live, a head sees only the rows that no head before it was confident of;
  so there are quantiles over all rows and over those that reach it.

  Args:
    probabilities: of all heads, calibrated.
    threshold: of the confidence rule.
    layers: of the heads, `[E]`.

  Returns:
    `threshold`; `confidences` of the first head and rows by depth, `depths`,
    as `serve_lib.drift.Calibration.from_dict` takes them; `exit_shares` `[E]`
    of the rows by head; `quantile_levels` `[Q]`; `confidence_quantiles`
    `[E][Q]` over all rows; `reached_rows` `[E]` and `reached_quantiles`
    `[E][Q]` over the rows that reach the head, None where none does.
  """
  confidence = probabilities.max(-1)
  exits = predictions.confidence_exit(probabilities, threshold)
  heads = len(confidence)
  reached = [own[exits >= head] for head, own in enumerate(confidence)]
  calibration = drift.Calibration.of(confidence[0], np.asarray(layers)[exits])
  return calibration.as_dict() | {
    'threshold': threshold,
    'exit_shares': (np.bincount(exits, minlength=heads) / len(exits)).tolist(),
    'quantile_levels': list(QUANTILES),
    'confidence_quantiles': [_quantiles(own) for own in confidence],
    'reached_rows': [len(own) for own in reached],
    'reached_quantiles': [_quantiles(own) for own in reached],
  }


def _quantiles(values: Float[np.ndarray, ' N']) -> list[float] | None:
  return np.quantile(values, QUANTILES).tolist() if len(values) else None


class Evaluator:
  """ECE of each head before and after temperature; writes calibration.json.

  Temperatures are fitted on `calibration_split`, of those heads whose ECE
  there is above `only_above`; the ECEs that are reported are of `split`. With
  `epsilon` above 0 a confidence threshold with a guarantee (see
  `eval_lib.risk`) is certified on `split`, which nothing was fitted to: with
  probability 1 - `delta`, at most a share `epsilon` of the answers differ from
  the full model's.

  Configuration: `split`, `calibration_split`, `bins`, `only_above`,
  `threshold` (at which the statistics for the drift check are taken, on
  `calibration_split`), `epsilon`, `delta`, `layers` of the heads, and
  `dataset` if not the run's own.
  """

  FIELDS: ClassVar[Mapping[str, Field]] = {
    'split': text('the name of a split', 'validation'),
    'calibration_split': text(
      'the name of a split that neither training nor `split` uses, such as '
      "'train[95%:]'"
    ),
    'bins': integer(1, 1000, BINS),
    'only_above': real(0.0, 1.0, ONLY_ABOVE),
    'threshold': real(0.0, 1.0, 0.9),
    'epsilon': real(0.0, 0.5, 0.0),
    'delta': real(1e-6, 0.5, 0.1),
    'layers': predictions.LAYERS,
    'dataset': evaluator.DATASET,
  }

  def __init__(self, config: Mapping[str, Any], context: evaluator.EvalContext):
    self._config, self._context = config, context
    if config['split'] == config['calibration_split']:
      raise ConfigError(
        'calibration_split',
        config['calibration_split'],
        'another split than `split`: what was fitted cannot judge itself',
      )
    self._dataset, self._held_out = (
      evaluator.build_dataset(config['dataset'], config[split], context)
      for split in ('split', 'calibration_split')
    )
    if self._dataset.info.num_classes < 2:
      raise ConfigError(
        'dataset', 'a regression', 'classes: numbers have no confidence'
      )

  def run(self, variables: Any) -> dict[str, float]:
    """Fits, measures and writes `calibration.json` into the workdir.

    Returns:
      For every head (`layer_4`, or `head_1` without `layers`):
      `ece_<head>`, `ece_calibrated_<head>`, `temperature_<head>`; with
      `epsilon` also `guaranteed_early` (share of the rows that leave before
      the last head) and, if one was certified, `guaranteed_threshold`.
    """
    logits, labels = self._record(
      'calibration_split', self._held_out, variables
    )
    bins, only_above = self._config['bins'], self._config['only_above']
    temperatures = fit_temperatures(logits, labels, bins, only_above)
    layers = predictions.layers_of(self._config['layers'], len(logits))
    report = {
      'calibration_split': self._config['calibration_split'],
      'calibration_rows': len(labels),
      'calibration_ece': errors(logits, labels, bins),
      'temperatures': temperatures.tolist(),
      'drift': drift_statistics(
        predictions.probabilities(logits, temperatures),
        float(self._config['threshold']),
        layers,
      ),
    }
    logits, labels = self._record('split', self._dataset, variables)
    report |= {
      'split': self._config['split'],
      'rows': len(labels),
      'layers': layers,
      'bins': bins,
      'ece': errors(logits, labels, bins),
      'ece_calibrated': errors(logits, labels, bins, temperatures),
      'guarantee': self._certify(
        predictions.probabilities(logits, temperatures)
      ),
    }
    if self._context.workdir and jax.process_index() == 0:
      path = pathlib.Path(self._context.workdir) / FILE
      lines = json.dumps(report, indent=2, allow_nan=False)
      predictions.replace_file(path, lines + '\n')
    return self._metrics(report)

  def _record(self, split, dataset, variables):
    name = self._config[split]
    return predictions.labelled_logits(dataset, name, variables, self._context)

  def _certify(self, probabilities) -> dict[str, Any] | None:
    """A threshold for the disagreement, or None if none is asked for."""
    epsilon, delta = self._config['epsilon'], self._config['delta']
    if not epsilon:
      return None
    guarantee, early = risk.certify_confidence(
      probabilities, float(epsilon), float(delta)
    )
    return {'loss': 'disagreement', 'early': early} | dataclasses.asdict(
      guarantee
    )

  def _metrics(self, report: Mapping[str, Any]) -> dict[str, float]:
    names = predictions.head_names(
      self._config['layers'], len(report['temperatures'])
    )
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
