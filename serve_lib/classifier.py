"""Serves a trained classification with its calibration and certificate.

`Task.SERVE` names a function of this module, or one of its form of a family:
`serve(task, options, run)` checks the options and returns a function from the
variables to (chain, policy). `run` is a `train_lib.task.ServedRun`, in whose
directory `eval_lib.calibration` and `eval_lib.certificate` wrote their files.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from core import fields, files, registry
from core.errors import ConfigError
from dataset_lib import tokenizer
from dataset_lib.text_tasks import num_texts
from eval_lib import calibration, certificate
from serve_lib import items
from serve_lib.decisions import GUARANTEED, ClassifierPolicy, OneStage
from serve_lib.monitor import Monitor, OnDrift, monitor_of

Serve = Callable[[Any], tuple[Any, Any]]  # from variables to (chain, policy)


def serve(task: Any, options: Mapping[str, Any], run: Any) -> Serve:
  """Serves a model of inputs of one size as one stage, without options."""
  for name, value in options.items():
    raise ConfigError(f'serve.{name}', value, 'no options for this model')
  if run.lengths is not None:
    raise ConfigError('lengths', run.lengths, 'none for inputs of one size')
  return functools.partial(one_stage, task, item_reader(task), (1,), run)


def serve_texts(task: Any, options: Mapping[str, Any], run: Any) -> Serve:
  """Serves a model of texts as one stage; options: `TextOptions`."""
  limit = read_options(items.TextOptions, options).max_characters
  lengths = text_lengths(task, run.lengths)
  reader = text_reader(task, lengths[-1], limit)
  return functools.partial(one_stage, task, reader, lengths, run)


def read_options(kind: Any, options: Mapping[str, Any]) -> Any:
  """Returns the checked options, an object of the dataclass `kind`."""
  return kind(**fields.check(kind, options, 'serve'))


def one_stage(
  task: Any, reader: Any, lengths: tuple[int, ...], run: Any, variables: Any
) -> tuple[OneStage, ClassifierPolicy]:
  """Returns chain and policy of a model without exits."""

  def apply(variables: Any, batch: Any) -> Any:
    model_state = variables.get('model_state', {})
    return task.apply(variables['params'], model_state, batch)[0]

  def chain(variables: Any, models: Any) -> OneStage:
    return OneStage(apply, variables, reader)

  parts = lengths, chain, ClassifierPolicy
  return with_files(task, run, 'trained', '', *parts)(variables)


def item_reader(task: Any, length: int = 1) -> items.ItemReader:
  """Returns the reader of items, images or token ids of one length bucket."""
  info = task.info
  if info.input_key == 'tokens':
    return items.TokenReader(length, info.input_shape[0], info.vocab_size)
  if info.input_key != 'image':
    raise ConfigError('task', info.input_key, 'images, tokens or texts')
  size = info.input_shape[0]
  # A data set that does not say has no central crop.
  settings = {'resize_small': size, 'max_pixels': files.MAX_PIXELS}
  settings |= {**task.config['dataset'], **info.preprocessing}
  return items.ImageReader(
    length, size, settings['resize_small'], settings['max_pixels']
  )


def text_lengths(task: Any, lengths: Sequence[int] | None) -> tuple[int, ...]:
  """Returns the requested buckets, or the training data's, sorted."""
  longest, least = task.info.input_shape[0], tokenizer.MIN_LENGTH
  if lengths is None:
    return task.info.length_buckets or (longest,)
  buckets = sorted({*lengths}) or [0]
  if buckets[0] < 1 or not least <= buckets[-1] <= longest:
    rows = f'{longest}, the longest row of the run (dataset.max_length)'
    legal = f'numbers of tokens from 1 to {rows}, one of them >= {least}'
    raise ConfigError('lengths', tuple(lengths), legal)
  return tuple(buckets)


def text_reader(
  task: Any, max_length: int, max_characters: int
) -> items.TextReader:
  """Returns the reader of texts; of token ids if there is no tokenizer."""
  dataset = task.config['dataset']
  path = dataset.get('tokenizer', '')
  # A model without types ignores those that a tokenizer gives. With one type
  # only the data tell if there may be a second text.
  types = getattr(task.model, 'type_vocab_size', 0) or 2
  count: Any = num_texts(dataset) or (1 if types == 1 else None)
  vocabulary = getattr(task.model, 'vocab_size', task.info.vocab_size)
  return items.TextReader(
    tokenizer.load(path) if path else None, max_length, max_characters,
    num_texts=count, vocab_size=vocabulary, num_types=types,
  )  # fmt: skip


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

  def about(self) -> tuple[dict[str, Any], ...]:
    """Returns what each certificate promises, and its setting, for JSON."""
    names = 'risk', 'method', 'epsilon', 'delta', 'rows', 'tau', 'model'
    return files.with_tuples([
      {'task': self.column, 'source': source}
      | {name: entry[name] for name in names if name in entry}
      for source, entry in self.values['sources'].items()
    ])  # fmt: skip

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


def about(
  task: Any, run: Any, file: CertificateFile | None = None
) -> dict[str, Any]:
  """Returns `ClassifierPolicy.about` of a task that is served from a run."""
  kinds = {'model': task.model, 'task': task}
  names = {key: registry.name_of(type(one)) for key, one in kinds.items()}
  more = {'certificates': file.about()} if file else {}
  return names | {'step': run.step} | more


def with_files(
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
      options['about'] = about(task, run, file)
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
