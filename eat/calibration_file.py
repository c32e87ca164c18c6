"""The file `calibration.json` of a run, as serving reads it.

The evaluator 'calibration' writes it: temperatures, an optional guarantee, and
the reference of the drift check.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import annotated_types

from dataset_lib import fields
from dataset_lib.errors import ConfigError
from eval_lib.calibration import FILE, fingerprint
from serve_lib.drift import Calibration, DriftCheck

Temperature = Annotated[float, annotated_types.Gt(0.0)]


@dataclasses.dataclass(frozen=True)
class CalibrationFile:
  """Contents of a calibration; every error names the command that repairs it.

  Attributes:
    directory: of the run; '' for none.
    step: of the checkpoint that is served, for messages.
    values: of the file, or {} if there is none.
  """

  directory: str
  step: int | None
  values: Mapping[str, Any]

  @classmethod
  def read(cls, directory: str, step: int | None = None) -> 'CalibrationFile':
    """Reads the file of a run; raises ConfigError if it is damaged."""
    empty = cls(directory, step, {})
    if not directory or not empty.path.is_file():
      return empty
    try:
      values = json.loads(empty.path.read_text(encoding='utf-8'))
      if not isinstance(values, dict):
        raise ValueError(f'{type(values).__name__} at the top')
    except ValueError as error:
      raise empty._error('', str(error), 'the JSON of a calibration') from error
    return cls(directory, step, values)

  @property
  def path(self) -> pathlib.Path:
    """Path of the file."""
    return pathlib.Path(self.directory) / FILE

  def check_parameters(self, variables: Mapping[str, Any]) -> None:
    """Raises ConfigError for a calibration of another checkpoint.

    One without a fingerprint of its parameters passes.
    """
    known = self.values.get('parameters')
    if known is not None and known != (served := fingerprint(variables)):
      raise self._error(
        '',
        f'that of the parameters {known}',
        'the calibration of the checkpoint that is served, whose parameters '
        f'are {served}',
      )

  def temperatures(self, heads: int) -> tuple[float, ...]:
    """Returns the temperature of each head, or () if there are none.

    Raises:
      ConfigError: there is not one for each head, or one is not positive.
    """
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

    Raises:
      ConfigError: the statistics are damaged.
    """
    drift = self.values.get('drift')
    if drift is None:
      return None
    try:
      return DriftCheck(Calibration.from_dict(drift), on_drift=on_drift)
    except (KeyError, TypeError, ValueError) as error:
      given = f'{type(error).__name__}: {error}'
      expected = 'confidences and a threshold'
      raise self._error(': drift', given, expected) from error

  def repair(self) -> str:
    """Returns the command that writes the file, with its guarantee if any."""
    command = (
      f'run python -m launch.evaluate --workdir={self.directory} '
      '--evals=calibration'
    )
    if self.step is not None:
      command += f' --step={self.step}'
    guarantee = self.values.get('guarantee') or {}
    for name in ('epsilon', 'delta'):
      if name in guarantee:
        command += f' --config.evals.calibration.{name}={guarantee[name]}'
    return command

  def _error(self, part: str, given: Any, expected: str) -> ConfigError:
    return ConfigError(
      f'{self.path}{part}', given, f'{expected}; {self.repair()}'
    )
