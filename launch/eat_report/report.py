"""From the flags to the files; see `launch.eat_report.command`."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from eval_lib import plots, token_page, token_plots
from launch.eat_report import (
  models,
  pictures,
  report_tables,
  rivals,
  sentences,
  speed,
  sweeps,
)
from launch.eat_report.models import Model, Run
from launch.eat_report.report_tables import Tables
from launch.eat_report.speed import Speed
from launch.eat_report.sweeps import Setting
from train_lib import strict_json

MAIN = 'EAT'
DENSE = ('dense', 'student')  # runs that other libraries can run too


@dataclasses.dataclass
class Report:
  """What has been found out so far.

  Attributes:
    main: the model of the EAT run as it was trained.
    temperatures_from: where its temperatures come from.
    labels: of the rows.
    metric: name of the quality.
    settings: all settings of the EAT run and its variants.
    others: the one setting of each other run, by the run's name.
    timed: the settings that are timed, others included.
    reference: name of the setting that speed is compared with.
    speed: what was measured; None if nothing was.
    guarantee: how often it failed, by the kind of risk; [] if not asked for.
    rivals: our settings that other libraries ran too, by their name for it.
  """

  main: Model
  temperatures_from: str
  labels: np.ndarray
  metric: str
  settings: list[Setting]
  others: dict[str, Setting]
  timed: list[Setting]
  reference: str
  speed: Speed | None = None
  guarantee: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  rivals: dict[str, Setting] = dataclasses.field(default_factory=dict)

  @property
  def everything(self) -> list[Setting]:
    """All settings of all runs."""
    return [*self.others.values(), *self.settings]


def report(arguments: Any, options: Mapping[str, Any]) -> dict[str, Any]:
  """Makes the report and returns what stands in result.json.

  Args:
    arguments: the flags of `launch.benchmark eat`.
    options: what `launch.eat_report.command.check` made of them.

  Raises:
    ConfigError: a run is none, or not on the same rows.
    UsageError: a flag does not fit the run.
  """
  tables = Tables()
  out = pathlib.Path(arguments.out)
  found = _sweep(arguments, options, tables)
  out.mkdir(parents=True, exist_ok=True)
  if arguments.guarantee:
    # Before the long part: it can refuse the model.
    found.guarantee = sweeps.guarantee(
      found.main, found.labels, arguments.epsilon, arguments.delta,
      arguments.draws,
    )  # fmt: skip
  if found.timed:
    tables.say(f'timing {len(found.timed)} settings')
    _time(arguments, found, tables)
  result = _write_tables(arguments, found, tables, out)
  _draw(arguments, found, tables, out)
  strict_json.write(out / 'result.json', result)
  tables.say(f'written: {out}')
  return result


def _time(arguments: Any, found: Report, tables: Tables) -> None:
  """Times the chosen settings, and others' libraries on the dense models."""
  rows = speed.places(len(found.labels), arguments.rows)
  dense = {name: one for name, one in found.others.items() if name in DENSE}
  with rivals.start(
    arguments.peers, dense, rows, arguments.batch_size, tables.say
  ) as processes:
    found.speed = speed.measure(
      found.timed,
      rows,
      processes,
      warmup=arguments.warmup,
      repeats=arguments.repeats,
      batch_size=arguments.batch_size,
      cache_directory=arguments.compilation_cache,
    )
    found.rivals = {
      one.name: one.setting for one in processes if one.is_alive()
    }


def _sweep(
  arguments: Any, options: Mapping[str, Any], tables: Tables
) -> Report:
  """Records all models and measures all settings on their logits."""
  run = models.load(
    MAIN, arguments.workdir, arguments.split, arguments.limit, '--workdir',
    arguments.step,
  )  # fmt: skip
  others = _other_runs(arguments, options, run)
  labels = models.labels_of(run)
  tables.say(f'{run.directory}, step {run.step}: {len(labels)} rows of split '
             f'{run.split}, {jax.devices()[0].device_kind}')  # fmt: skip
  temperatures, source = models.temperatures_of(run)
  module = models.service.as_adaptive(run.task.model)
  recorded = {
    name: models.record(run, variant, name, temperatures)
    for name, variant in models.variants(
      module, options['scales'], change_window=True
    ).items()
  }
  main = recorded['']
  compared = {
    name: models.record(
      other, models.service.as_adaptive(other.task.model), '',
      models.temperatures_of(other)[0],
    )
    for name, other in others.items()
  }  # fmt: skip
  dense = compared.get('dense', main)
  full = models.dense_flops(dense)
  metric, quality, agreement = models.quality_of(run)

  def measure(model, rules, prefix=''):
    return sweeps.measure(
      model, rules, labels, quality, agreement, full, prefix
    )

  settings = [
    setting
    for model in recorded.values()
    for setting in measure(model, _rules(model, arguments.tau))
  ]
  single = {}
  for name, model in compared.items():
    rule = sweeps.default_name(model, arguments.tau)
    rules = _rules(model, arguments.tau)
    [single[name]] = measure(model, {rule: rules[rule]}, f'{name}/')
  default = sweeps.default_name(main, arguments.tau)
  timed = sweeps.choose(settings, arguments.time, default, arguments.most)
  names = {setting.name: setting for setting in settings}
  reference = single.get('dense', names['never'])
  if timed:
    if options['ablation']:
      timed = [names[default], *timed]
    timed = [reference, *single.values(), *timed]
    timed = list({setting.name: setting for setting in timed}.values())
  return Report(
    main, source, labels, metric, settings, single, timed, reference.name
  )


def _rules(model: Model, tau: float) -> dict[str, Any]:
  """The swept rules, and the default one if it is not among them."""
  rules = sweeps.rules(model)
  default = sweeps.default_name(model, tau)
  if default not in rules:
    rules[default] = sweeps.Rule('confidence', tau=tau), tau
  return rules


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


def _write_tables(
  arguments: Any, found: Report, tables: Tables, out: pathlib.Path
) -> dict[str, Any]:
  """Prints and writes all tables; returns the main numbers."""
  write = report_tables.write_csv
  rows = {
    setting.name: report_tables.setting_row(setting)
    for setting in found.everything
  }
  write(out / 'settings.csv', list(rows.values()))
  shown = found.timed or [
    *found.others.values(),
    *sweeps.choose(
      found.settings, 'auto',
      sweeps.default_name(found.main, arguments.tau), arguments.most,
    ),
  ]  # fmt: skip
  tables.settings(
    [rows[setting.name] for setting in shown],
    found.metric,
    f'{len(shown)} of {len(rows)} settings (all: settings.csv)',
  )
  result: dict[str, Any] = {
    'workdir': arguments.workdir,
    'step': found.main.run.step,
    'split': found.main.run.split,
    'rows': len(found.labels),
    'device': jax.devices()[0].device_kind,
    'metric': found.metric,
    'reference': found.reference,
    'length': pictures.spread(found.main.length),
    'settings': {setting.name: rows[setting.name] for setting in shown},
  }
  write(
    out / 'examples.csv',
    report_tables.example_rows(shown, found.labels, found.speed),
  )
  if found.speed is not None:
    result['speed'] = _speed(found, rows, tables, out)
  if found.main.logits.shape[-1] > 1:
    result['calibration'] = _calibration(found, tables, out)
  if found.guarantee:
    result['guarantee'] = found.guarantee
    write(out / 'guarantee.csv', result['guarantee'])
    tables.guarantee(result['guarantee'])
  return result


def _speed(
  found: Report, rows: Mapping[str, Any], tables: Tables, out: pathlib.Path
) -> dict[str, Any]:
  assert found.speed is not None
  names = [*(setting.name for setting in found.timed), *found.rivals]
  timings = [
    report_tables.speed_row(name, found.speed, found.reference)
    for name in names
  ]
  # The same model gives the same quality.
  rows = {**rows} | {
    name: rows[setting.name] for name, setting in found.rivals.items()
  }
  report_tables.write_csv(out / 'timings.csv', timings)
  tables.speed(timings, rows, found.metric, found.reference)
  differing = sum(found.speed.differing.values())
  if differing:
    tables.say(
      f'{differing} of {len(timings) * len(found.speed.rows)} answers differ '
      'from the recorded ones (timings.csv); a few at thresholds are rounding'
    )
  return {row['setting']: row for row in timings}


def _calibration(
  found: Report, tables: Tables, out: pathlib.Path
) -> Sequence[Mapping[str, Any]]:
  main = found.main
  rows = report_tables.calibration_rows(
    main.logits, found.labels, main.temperatures, main.heads
  )
  report_tables.write_csv(out / 'calibration.csv', rows)
  tables.calibration(rows, found.temperatures_from)
  return rows


def _draw(
  arguments: Any, found: Report, tables: Tables, out: pathlib.Path
) -> None:
  """Writes all pictures; without matplotlib only the page."""
  main = found.main
  default = sweeps.default_name(main, arguments.tau)
  [chosen] = [one for one in found.settings if one.name == default]
  rows = sentences.pick(chosen, found.labels, arguments.sentences)
  title = f'{main.run.directory}, {default}'
  drawn = sentences.sentences(chosen, rows, found.labels)
  if drawn:
    token_page.write_html(out / 'sentences', drawn, title=title)
  try:
    plots.load_matplotlib()
  except ImportError as error:
    tables.say(f'no pictures: {error}')
    return
  if drawn:
    token_plots.plot_tokens(out / 'sentences', drawn, title=title)
  pictures.frontiers(
    out, found.everything, found.speed, found.metric, found.rivals
  )
  pictures.exits(out, found.settings, main)
  pictures.retention(out, main)
  if main.logits.shape[-1] > 1:
    pictures.reliability(out, main, found.labels)
  if found.speed is not None and found.others:
    bars = {**found.others, MAIN: chosen}
    timed = {setting.name for setting in found.timed}
    pictures.ablation(
      out,
      {name: one for name, one in bars.items() if one.name in timed},
      found.speed,
      found.metric,
    )
