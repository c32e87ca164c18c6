"""Calibration of exit heads: expected calibration error and temperature.

EAT, section 7.2, measures by the ECE over 15 equal-width bins if confidences
`max_c P` are probabilities of being right; where it is above 2 %, it scales the
head's logits by a temperature (Guo, Pleiss, Sun and Weinberger, 2017).
"""

import contextlib
import dataclasses
import json
import pathlib
import shlex
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import jax
import numpy as np
import scipy.special
from absl import logging
from annotated_types import Interval
from jax.experimental import multihost_utils
from jaxtyping import Float, Int

from core import fields, files
from core.errors import ConfigError, InvalidDataError
from dataset_lib import builder
from eval_lib import evaluator, heads
from eval_lib.predictions import Heads, Labels, PerHead
from halting.row_rules import Temperature, scale, softmax

FILE = 'calibration.json'  # in the directory of a run
BINS = 15
# Metrics of each head, by their names in the file.
COLUMNS = {
  'temperature': 'temperatures', 'ece': 'ece',
  'ece_calibrated': 'ece_calibrated',
}  # fmt: skip
TEMPERATURES = (0.1, 10.0)
SPREAD = 0.5  # of log T, by which a calibrated head is expected to be off
MAX_CONFIDENCES = 4096  # kept of the calibration split
DRIFT_THRESHOLD = 0.9

Share = Annotated[float | int, Interval(ge=0.0, le=1.0)]


@dataclasses.dataclass(frozen=True)
class Reliability:
  """A reliability diagram in numbers: M equal-width bins of confidence.

  Bin b holds confidences in (b / M, (b + 1) / M], the first also 0; NaN: empty.
  """

  count: Int[np.ndarray, ' M']  # of rows
  confidence: Float[np.ndarray, ' M']
  accuracy: Float[np.ndarray, ' M']

  @property
  def error(self) -> float:
    """ECE, EAT's equation in section 7.2: in [0, 1]; empty bins add 0."""
    gaps = self.count * np.abs(self.accuracy - self.confidence)
    return float(np.nansum(gaps) / self.count.sum())


def reliability(
  probabilities: Float[np.ndarray, 'N C'], labels: Labels, bins: int = BINS
) -> Reliability:
  """Sorts the rows of a head into bins of confidence `max_c P`.

  Raises ValueError without rows, or for confidences outside of [0, 1].
  """
  confidence = probabilities.max(-1).astype(np.float64)
  # In float32 a softmax may exceed 1 by rounding.
  if not len(labels) or not ((confidence >= 0) & (confidence < 1.001)).all():
    raise ValueError(
      'probabilities: expected at least one row, in [0, 1], got '
      f'{len(labels)} rows: {confidence}'
    )
  right = (probabilities.argmax(-1) == labels).astype(np.float64)
  place = np.searchsorted(np.linspace(0.0, 1.0, bins + 1)[1:-1], confidence)
  count, *sums = (
    np.bincount(place, values, minlength=bins)
    for values in (None, confidence, right)
  )
  with np.errstate(invalid='ignore'):
    return Reliability(count, *(total / count for total in sums))


def errors(logits: Heads, labels: Labels, bins: int = BINS) -> list[float]:
  """Returns the ECE of each head, of calibrated or other logits."""
  return [reliability(softmax(h), labels, bins).error for h in logits]


def fit_temperature(logits: Float[np.ndarray, 'N C'], labels: Labels) -> float:
  """Returns the temperature of least loss in the limits; 1 if none is better.

  The loss is the negative log-likelihood of the rows and of a prior, log T ~
  N(0, `SPREAD`^2), which hundreds of rows outweigh. Without it 15 rows that
  happen to be right, or wrong, give certainty, or chance.
  """
  from scipy import optimize  # slow to import, and serving does not need it

  logits, (low, high) = logits.astype(np.float64), TEMPERATURES
  rows = range(len(logits))

  def loss(temperature: float) -> float:
    logs = scipy.special.log_softmax(logits / temperature, axis=1)
    unlikely = np.log(temperature) ** 2 / (2 * SPREAD**2)
    return float(unlikely - logs[rows, labels].sum())

  result = optimize.minimize_scalar(
    lambda log: loss(float(np.exp(log))),
    bounds=np.log((low, high)), method='bounded', options={'xatol': 1e-7},
  )  # fmt: skip
  return min((1.0, float(np.exp(result.x)), low, high), key=loss)


def fit_temperatures(
  logits: Heads, labels: Labels, bins: int = BINS, only_above: float = 0.02
) -> PerHead:
  """Fits a temperature for each head; 1 where its ECE is <= `only_above`.

  Logs a warning of each that is a bound of `TEMPERATURES`.
  """
  before = errors(logits, labels, bins)
  temperatures = [
    fit_temperature(head, labels) if error > only_above else 1.0
    for head, error in zip(logits, before, strict=True)
  ]
  for number, temperature in enumerate(temperatures, 1):
    if temperature in TEMPERATURES:
      logging.warning(
        'head %d of %d: the temperature %g is the bound of the search, so the '
        'fit is not trustworthy; the head may be near chance, or never wrong',
        number, len(temperatures), temperature,
      )  # fmt: skip
  return np.array(temperatures)


def drift_statistics(logits: Heads, threshold: float) -> dict[str, Any]:
  """Returns what `serve_lib.monitor.DriftCheck` compares live traffic with.

  The threshold of the confidence rule, and at most `MAX_CONFIDENCES` quantiles,
  ascending, of the confidences of the first head, which every row reaches.
  """
  confidence = softmax(logits[0]).max(-1)
  shares = np.linspace(0, 1, min(MAX_CONFIDENCES, len(confidence)))
  kept = np.quantile(confidence, shares, method='nearest')
  return {'threshold': threshold, 'confidences': kept.tolist()}


def fingerprint(variables: Any) -> str:
  """Returns a checksum of the parameters that temperatures belong to.

  Over all processes together. Independent of sharding.
  """
  crc = 0
  for leaf in jax.tree.leaves(variables):
    # One at a time: a host need not hold all of a large model twice.
    array = multihost_utils.process_allgather(leaf, tiled=True)
    crc = zlib.crc32(f'{array.dtype}{array.shape}'.encode(), crc)
    crc = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, crc)
  return f'crc32:{crc:08x}'


class ResultFile:
  """A JSON file that an evaluator leaves in a run, for serving.

  `values` is its content, {} without a file. Every error is a ConfigError with
  the command to repair it.
  """

  NAME: ClassVar[str]
  ENTRY: ClassVar[str]  # of `config.evals`

  def __init__(self, directory: str, step: int | None = None, column: str = ''):
    """Reads the file of a run, '' for none, and of a step, for messages.

    `column` is one of several that have labels.
    """
    self._directory, self._step, self.column = directory, step, column
    self.path = pathlib.Path(directory) / heads.named(self.NAME, column)
    self.entry = f'{self.ENTRY}_{column}' if column else self.ENTRY
    self.values: Mapping[str, Any] = {}
    if not directory:
      return
    try:
      with contextlib.suppress(FileNotFoundError):
        self.values = files.read_object(self.path)
      fields.check_value('dataset', self.values.get('dataset', {}), dict)
    except (InvalidDataError, ConfigError) as error:
      raise self.error(': content', str(error), 'its JSON') from error

  def check_parameters(self, variables: Mapping[str, Any]) -> None:
    """Checks the fingerprint of the parameters, if the file has one."""
    if self.values.get('parameters') is not None:
      self.check_fingerprint(fingerprint(variables))

  def check_fingerprint(self, served: str) -> None:
    """Raises ConfigError if the file is of other parameters."""
    saved = self.values.get('parameters')
    if saved not in (None, served):
      expected = f'the {self.entry} of the checkpoint in use, {served}'
      raise self.error('', f'that of the parameters {saved}', expected)

  def repair(self) -> str:
    """Returns the command that writes the file."""
    given = [f'--workdir={self._directory}', f'--evals={self.entry}']
    given += [] if self._step is None else [f'--step={self._step}']
    return f'run python -m launch.evaluate {shlex.join(given)}'

  def error(self, part: str, given: Any, expected: str) -> ConfigError:
    """Returns the error of a part of the file, which is damaged, or of all."""
    expected = f'{expected}; {self.repair()}'
    fault = ConfigError(f'{self.path}{part}', given, expected)
    fault.exit_code = InvalidDataError.exit_code if part else fault.exit_code
    return fault


class CalibrationFile(ResultFile):
  """The calibration of a run."""

  NAME, ENTRY = FILE, 'calibration'

  def temperatures(self, heads: int, layers: Any = ()) -> tuple[float, ...]:
    """Returns the temperature of each head (of `layers`); () without a file."""
    if not (self._directory and self.path.exists()):
      return ()
    numbers: Any = self.values.get('temperatures')
    legal: Any = tuple.__class_getitem__((Temperature,) * heads)
    if not fields.accepts(legal, numbers):
      expected = f'{heads} numbers in [0.001, 1000], one for each head'
      raise self.error(': temperatures', numbers, expected)
    named = self.values.get('layers', [*layers])
    if layers and named != [*layers]:
      raise self.error(': layers', named, f'the layers {[*layers]}')
    return tuple(map(float, numbers))

  def fitted_rows(self, dataset: fields.ConfigLike) -> Any:
    """Returns the rows of the calibration split; None if it is not named.

    `dataset` is that of the run, whose tokenizer is read.
    """
    if not (split := self.values.get('calibration_split')):
      return None
    settings = dict(self.values.get('dataset', dataset))
    if 'tokenizer' in settings:  # that of the calibration may have been moved
      settings['tokenizer'] = dataset['tokenizer']
    return builder.build_source(settings, split)


@dataclasses.dataclass(kw_only=True)
class Evaluator(heads.Evaluator):
  """ECE of each head before and after temperature; writes calibration.json.

  Temperatures are fitted on `calibration_split`; the ECEs that are reported are
  of `split`. The file names the parameters and data, so that it is not used for
  another checkpoint.
  """

  IS_FIRST = True
  calibration_split: Annotated[
    evaluator.Split,
    'the name of a split that neither training nor `split` uses, such as '
    "'validation[:50%]' with the split 'validation[50%:]'",
  ] = dataclasses.field()  # required
  bins: Annotated[int, Interval(ge=1, le=1000)] = BINS
  only_above: Share = 0.02  # heads with a smaller ECE keep temperature 1
  threshold: Share = DRIFT_THRESHOLD  # at which the drift check is to compare

  def metric_names(self, measured):
    """See `evaluator.Evaluator`."""
    names = self.names(len(self.layers))
    return [f'{kind}_{name}' for kind in COLUMNS for name in names] or None

  def run(self, variables: Any) -> dict[str, float]:
    """Returns `ece_`, `ece_calibrated_` and `temperature_<head>` of each head.

    Heads are `layer_4`, or `head_1` without `layers`; one alone has no name.
    """
    report = self.report(variables)
    names = [f'_{name}' for name in self.names(len(report['ece']))]
    names = names if self.layers or len(names) > 1 else ['']
    return {
      f'{column}{head}': value
      for column, name in COLUMNS.items()
      for head, value in zip(names, report[name], strict=True)
    }

  def report(self, variables: Any) -> dict[str, Any]:
    """Fits, measures, writes and returns the content of calibration.json."""
    fitted, fitted_labels = self.heads('calibration_split', variables)
    temperatures = fit_temperatures(
      fitted, fitted_labels, self.bins, self.only_above
    )
    logits, labels = self.heads('split', variables)
    scaled = scale(logits, temperatures)
    threshold = float(self.threshold)
    report: dict[str, Any] = {
      'parameters': fingerprint(variables),
      'dataset': self.data,
      'calibration_split': self.calibration_split,
      'calibration_rows': len(fitted_labels),
      'calibration_ece': errors(fitted, fitted_labels, self.bins),
      'temperatures': temperatures.tolist(),
      'drift': drift_statistics(scale(fitted, temperatures), threshold),
      'ece': errors(logits, labels, self.bins),
      'ece_calibrated': errors(scaled, labels, self.bins),
      'split': self.split,
      'rows': len(labels),
      'layers': [*self.names(len(logits)).values()],
      'bins': self.bins,
    }
    if path := self.file(FILE):
      # Not `write_json`, which writes a NaN as a text.
      lines = json.dumps(report, indent=2, allow_nan=False)
      files.write_text(path, lines + '\n')
    # Others read it: all processes find the same.
    multihost_utils.sync_global_devices(FILE)
    return report
