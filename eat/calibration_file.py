"""The file `calibration.json` of a run, as serving reads it.

The evaluator 'calibration' writes it: temperatures, an optional guarantee, and
the reference of the drift check.
"""

import contextlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np
from annotated_types import Gt

from dataset_lib import fields
from dataset_lib.errors import ConfigError, InvalidDataError
from eval_lib.calibration import FILE, fingerprint
from serve_lib.monitor import DriftCheck
from train_lib import strict_json

Temperature = Annotated[float, Gt(0.0)]


class CalibrationFile:
  """A calibration; every error is a ConfigError with the command to repair it.

  Attributes:
    path: of the file.
    values: of the file, or {} if there is none.
  """

  def __init__(self, directory: str, step: int | None = None):
    """Reads the file of a run, '' for none, and of a step, for messages."""
    self._directory, self._step = directory, step
    self.path = pathlib.Path(directory) / FILE
    self.values: Mapping[str, Any] = {}
    if not directory:
      return
    try:
      with contextlib.suppress(FileNotFoundError):
        self.values = strict_json.read_object(self.path)
    except InvalidDataError as error:
      raise self._error('', str(error), 'the JSON of a calibration') from error

  def check_parameters(self, variables: Mapping[str, Any]) -> None:
    """Checks the fingerprint of the parameters, if the file has one."""
    known = self.values.get('parameters')
    if known is not None and known != (served := fingerprint(variables)):
      raise self._error(
        '',
        f'that of the parameters {known}',
        'the calibration of the checkpoint that is served, whose parameters '
        f'are {served}',
      )

  def temperatures(self, heads: int) -> tuple[float, ...]:
    """Returns the temperature of each head, or () if there are none."""
    given = self.values.get('temperatures', ())
    name = f'{self.path}: temperatures'
    given = fields.check_value(name, given, tuple[Temperature, ...])
    if given and len(given) != heads:
      raise self._error(': temperatures', given, f'{heads}, one for each head')
    return given

  def drift_check(
    self, on_drift: Callable[[bool, dict[str, Any]], None] | None = None
  ) -> DriftCheck | None:
    """Returns a check against the calibration split; None without statistics.

    They are those of `eval_lib.calibration.drift_statistics`.
    """
    drift = self.values.get('drift')
    if drift is None:
      return None
    try:
      confidences = np.array(drift['confidences'], np.float64)
      return DriftCheck(
        confidences, float(drift['threshold']), on_drift=on_drift
      )
    except (KeyError, TypeError, ValueError) as error:
      given = f'{type(error).__name__}: {error}'
      expected = 'confidences and a threshold'
      raise self._error(': drift', given, expected) from error

  def repair(self) -> str:
    """Returns the command that writes the file, with its guarantee if any."""
    command = (
      f'run python -m launch.evaluate --workdir={self._directory} '
      '--evals=calibration'
    )
    if self._step is not None:
      command += f' --step={self._step}'
    guarantee = self.values.get('guarantee') or {}
    for name in ('epsilon', 'delta'):
      if name in guarantee:
        command += f' --config.evals.calibration.{name}={guarantee[name]}'
    return command

  def _error(self, part: str, given: Any, expected: str) -> ConfigError:
    return ConfigError(
      f'{self.path}{part}', given, f'{expected}; {self.repair()}'
    )
