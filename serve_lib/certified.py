"""What serving reads of a run's calibration and certificate.

`eval_lib.calibration` and `eval_lib.certificate` write them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from core import fields, files, registry
from core.errors import ConfigError
from eval_lib import calibration, certificate
from serve_lib.decisions import GUARANTEED
from serve_lib.monitor import Monitor, OnDrift, monitor_of


class Certified(NamedTuple):
  """A certified setting, as serving needs it."""

  tau: float  # of the confidence; infinity never exits early
  changes: Mapping[str, Any]  # of the fields of the model
  drift: Mapping[str, Any]  # see `calibration.drift_statistics`


class CertificateFile(calibration.ResultFile):
  """The certificates of a run, by the source of rows; '' for all others."""

  NAME, ENTRY = certificate.FILE, 'certificate'

  def __init__(self, directory: str, step: int | None = None, column: str = ''):
    """See the base."""
    self.sources: dict[str, Certified] = {}
    super().__init__(directory, step, column)
    try:
      for source, entry in self.values.get('sources', {}).items():
        tau = np.inf if entry['tau'] is None else float(entry['tau'])
        changes = dict(files.with_tuples(entry['model']))
        self.sources[source] = Certified(tau, changes, dict(entry['drift']))
        fields.check_value('dataset', entry.get('dataset', {}), dict)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      given, expected = f'{type(error).__name__}: {error}', 'certificates'
      raise self.error(': sources', given, expected) from error

  def repair(self) -> str:
    """Returns the command that writes the file, with its bounds if any."""
    command = super().repair()
    for source in [*self.sources][:1]:
      for name in ('risk', 'epsilon', 'delta'):
        value = self.values['sources'][source].get(name)
        command += f' --config.evals.{self.entry}.{name}={value}'
    return command

  def warnings(self) -> Iterator[str]:
    """Yields a line for each source whose certificate certifies nothing."""
    for source, one in self.sources.items():
      if one.tau == np.inf:
        where = f'source {source!r}: ' if len(self.sources) > 1 else ''
        why = certificate.emptiness(self.values['sources'][source])
        yield (
          f'{where}every row runs at full depth, as the certificate {why}; '
          f'give it more rows, or a larger epsilon: {self.repair()}'
        )

  def check_temperatures(self, temperatures: Sequence[float]) -> None:
    """Raises ConfigError unless the thresholds are for these temperatures."""
    stored = self.values.get('temperatures', [])
    if stored != [*temperatures]:
      expected = f'those of calibration.json, {[*temperatures]}'
      raise self.error(': temperatures', stored, expected)

  def serve(
    self, model: Any, first: str, on_drift: OnDrift | None, drift: Any = None
  ) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the certified models by name, and fields of a policy for them.

    `first` is the name of the model as trained, which serves during drift;
    `drift` are the statistics of sources without a certificate, if any.
    """
    models, names, checks = {}, {}, {'': drift}
    for source, one in self.sources.items():
      kind: Any = type(model)
      legal = fields.hints(kind)
      changes = dict(one.changes)
      name = ', '.join(f'{k}={value}' for k, value in one.changes.items())
      names[source], checks[source] = name or first, one.drift
      for field, value in changes.items():
        place = f': sources.{source}.model.{field}'
        if field not in legal or not fields.accepts(legal[field], value):
          raise self.error(place, value, f'a value of {kind.__name__}')
        if fields.is_open(legal[field]):
          try:
            changes[field] = registry.named(value, field, legal[field])
          except ConfigError as error:
            raise self.error(place, value, error.expected) from error
      if name:
        models[name] = model.clone(**changes)
    checked = monitor(self, checks, on_drift)
    return models, {'certified': names, 'monitor': checked}


def about(task: Any, run: Any) -> dict[str, Any]:
  """Returns `ClassifierPolicy.about` of a task that is served from a run."""
  kinds = {'model': task.model, 'task': task}
  names = {key: registry.name_of(type(one)) for key, one in kinds.items()}
  return names | {'step': run.step}


def serve(
  task: Any,
  run: Any,
  setting: str,
  first: str,
  lengths: tuple[int, ...],
  chain: Callable[[Any, Mapping[str, Any]], Any],
  policy: Callable[..., Any],
) -> Callable[[Any], tuple[Any, Any]]:
  """Returns `Task.serve` of a model with one head and, maybe, certificates.

  `chain` maps variables and the certified models, by name, to a chain whose
  first variant is `first`. Only with the setting 'guaranteed' there are such.
  Raises ConfigError for files of other variables, or without a certificate.
  """

  def serve_variables(variables: Any) -> tuple[Any, Any]:
    calibrated = calibration.CalibrationFile(run.directory, run.step)
    calibrated.check_parameters(variables)
    models: dict[str, Any] = {}
    scales = calibrated.temperatures(1, task.head_layers)
    options: dict[str, Any] = {
      'temperatures': scales, 'about': about(task, run)
    }  # fmt: skip
    if setting == GUARANTEED:
      file = CertificateFile(run.directory, run.step)
      if not file.sources:
        raise file.error('', 'no certificate', 'one')
      file.check_parameters(variables)
      file.check_temperatures(scales)
      models, own = file.serve(task.model, first, run.on_drift)
      options |= own | {'warnings': tuple(file.warnings())}
    stages = chain(variables, models)
    return stages, policy(
      stages, stages.reader, task.label_names, lengths,
      several=task.MULTI_LABEL, **options,
    )  # fmt: skip

  return serve_variables


def monitor(
  file: calibration.ResultFile,
  checks: Mapping[str, Any],
  on_drift: OnDrift | None,
) -> Monitor:
  """Returns `monitor_of` a file's `calibration.drift_statistics`."""
  try:
    return monitor_of(checks, on_drift)
  except (KeyError, TypeError, ValueError) as error:
    expected = 'confidences and a threshold'
    raise file.error(': drift', repr(error), expected) from error
