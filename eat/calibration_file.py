"""The file `calibration.json` of a run: read, and fit to be used.

The evaluator 'calibration' writes it: temperatures, perhaps a guarantee, and
what traffic is compared with to see drift.
"""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from dataset_lib.errors import ConfigError
from eval_lib.calibration import FILE, fingerprint
from serve_lib.drift import Calibration, DriftCheck


def read_calibration(directory: str) -> dict[str, Any]:
  """What the evaluator 'calibration' found out, or nothing.

  Raises:
    ConfigError: the file is damaged.
  """
  path = path_in(directory)
  if not path.is_file():
    return {}
  try:
    result = json.loads(path.read_text(encoding='utf-8'))
    if not isinstance(result, dict):
      raise ValueError(f'{type(result).__name__} at the top')
  except ValueError as error:
    raise ConfigError(
      str(path), str(error), f'the JSON of a calibration; {mend(directory)}'
    ) from error
  return result


def check_parameters(
  calibration: Mapping[str, Any],
  variables: Mapping[str, Any],
  directory: str,
  step: int | None = None,
) -> None:
  """Refuses temperatures and certificates of another checkpoint.

  A calibration that does not say what it is of, as old ones, passes.

  Raises:
    ConfigError: with the command that makes the right one.
  """
  known = calibration.get('parameters')
  if known is None:
    return
  served = fingerprint(variables)
  if served != known:
    raise ConfigError(
      str(path_in(directory)),
      f'that of the parameters {known}',
      'the calibration of the checkpoint that is served, whose parameters are '
      f'{served}; {mend(directory, step, calibration)}',
    )


def drift_check(
  calibration: Mapping[str, Any],
  directory: str,
  on_drift: Callable[[bool, dict[str, Any]], None] | None = None,
) -> DriftCheck | None:
  """A check against the calibration split, whatever the rule in use.

  Args:
    calibration: see `read_calibration`.
    directory: of the run.
    on_drift: see `serve_lib.drift.DriftCheck`.

  Returns:
    None if the calibration has nothing to compare with.

  Raises:
    ConfigError: the file is damaged.
  """
  drift = calibration.get('drift')
  if drift is None:
    return None
  try:
    return DriftCheck(Calibration.from_dict(drift), on_drift=on_drift)
  except (KeyError, TypeError, ValueError) as error:
    raise ConfigError(
      f'{path_in(directory)}: drift', f'{type(error).__name__}: {error}',
      f'confidences and a threshold; {mend(directory)}',
    ) from error  # fmt: skip


def path_in(directory: str) -> pathlib.Path:
  """Where the calibration of a run is."""
  return pathlib.Path(directory) / FILE


def mend(
  directory: str,
  step: int | None = None,
  calibration: Mapping[str, Any] | None = None,
) -> str:
  """The command that writes a calibration, with a guarantee if it had one."""
  command = (
    f'run python -m launch.evaluate --workdir={directory} --evals=calibration'
  )
  if step is not None:
    command += f' --step={step}'
  guarantee = (calibration or {}).get('guarantee') or {}
  for name in ('epsilon', 'delta'):
    if name in guarantee:
      command += f' --config.evals.calibration.{name}={guarantee[name]}'
  return command
