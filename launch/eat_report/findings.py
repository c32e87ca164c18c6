"""What an EAT report is about: runs, recorded models, measured settings."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from eat import serving
from launch.eat_report import models, quality, sweeps, temperatures
from launch.eat_report.models import Model, Run
from launch.eat_report.speed import Speed
from launch.eat_report.sweeps import Setting
from launch.eat_report.temperatures import Temperatures

MAIN = 'EAT'


@dataclasses.dataclass
class Findings:
  """What has been found out so far.

  Attributes:
    main: the model of the EAT run as it was trained.
    temperatures: of its heads.
    fitted: which rows they were fitted to, bool `[N]`.
    labels: of the rows, `[N]`.
    metric: name of the quality.
    settings: all settings of the EAT run and its variants.
    others: the one setting of each other run, by the run's name.
    default: the setting that the EAT run is served with unless told otherwise.
    timed: the settings that are timed, others included.
    reference: the setting that speed is compared with.
    speed: what was measured; None if nothing was.
    guarantee: how often it failed, by the kind of risk; [] if not asked for.
    rivals: our settings that other libraries ran too, by their name for it.
  """

  main: Model
  temperatures: Temperatures
  fitted: np.ndarray
  labels: np.ndarray
  metric: str
  settings: list[Setting]
  others: dict[str, Setting]
  default: Setting
  timed: list[Setting]
  reference: Setting
  speed: Speed | None = None
  guarantee: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  rivals: dict[str, Setting] = dataclasses.field(default_factory=dict)

  @property
  def everything(self) -> list[Setting]:
    """All settings of all runs."""
    return [*self.others.values(), *self.settings]


def sweep(
  arguments: Any, options: Mapping[str, Any], say: Callable[[str], None]
) -> Findings:
  """Records all models and measures all settings on their logits.

  Args:
    arguments: the flags of `launch.benchmark eat`.
    options: what `launch.eat_report.command.check` made of them.
    say: prints a line.

  Raises:
    ConfigError: a run is none, or not on the same rows.
    UsageError: a flag does not fit the run.
  """
  run = models.load(
    MAIN, arguments.workdir, arguments.split, arguments.limit, '--workdir',
    arguments.step,
  )  # fmt: skip
  others = _other_runs(arguments, options, run)
  labels = models.labels_of(run)
  say(
    f'{run.directory}, step {run.step}: {len(labels)} rows of split '
    f'{run.split}, {jax.devices()[0].device_kind}'
  )
  own = temperatures.of(run)
  recorded = _variants(run, own.values, options['scales'])
  main = recorded['']
  compared = {name: _as_it_is(other) for name, other in others.items()}
  full = models.dense_flops(compared.get('dense', main))
  metric, score, agreement = quality.of(run)

  def measure(model, rules, prefix=''):
    return sweeps.measure(model, rules, labels, score, agreement, full, prefix)

  settings = [
    setting
    for model in recorded.values()
    for setting in measure(model, sweeps.rules(model, arguments.tau))
  ]
  single = {}
  for name, model in compared.items():
    rule = sweeps.default_name(model, arguments.tau)
    rules = sweeps.rules(model, arguments.tau)
    [single[name]] = measure(model, {rule: rules[rule]}, f'{name}/')
  names = {setting.name: setting for setting in settings}
  default = names[sweeps.default_name(main, arguments.tau)]
  reference = single.get('dense', names['never'])
  timed = sweeps.choose(settings, arguments.time, default.name, arguments.most)
  if timed:
    if options['ablation']:
      timed = [default, *timed]
    timed = [reference, *single.values(), *timed]
    timed = list({setting.name: setting for setting in timed}.values())
  return Findings(
    main, own, temperatures.fitted_rows(run, own), labels, metric, settings,
    single, default, timed, reference,
  )  # fmt: skip


def _other_runs(
  arguments: Any, options: Mapping[str, Any], run: Run
) -> dict[str, Run]:
  given = {'dense': arguments.dense, 'student': arguments.student}
  result = {}
  for name, directory in {**given, **options['ablation']}.items():
    if directory:
      flag = f'--{name}' if name in given else '--ablation'
      other = models.load(
        name, directory, arguments.split, arguments.limit, flag
      )
      models.check_same_rows(run, other, flag)
      result[name] = other
  return result


def _variants(
  run: Run, values: np.ndarray, scales: tuple[float, ...]
) -> dict[str, Model]:
  """The run as it was trained, under '', and changed."""
  module = serving.as_adaptive(run.task.model)
  return {
    name: models.record(run, variant, name, values)
    for name, variant in models.variants(
      module, scales, change_window=True
    ).items()
  }


def _as_it_is(run: Run) -> Model:
  module = serving.as_adaptive(run.task.model)
  return models.record(run, module, '', temperatures.of(run).values)
