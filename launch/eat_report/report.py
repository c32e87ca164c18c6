"""From the flags to the files; see `launch.eat_report.command`."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from eval_lib import text_pages
from launch.eat_report import (
  fastest,
  findings,
  guarantee,
  pictures,
  report_rows,
  rivals,
  sentences,
  speed,
  sweeps,
)
from launch.eat_report.findings import Findings
from launch.eat_report.report_tables import Tables
from train_lib import strict_json

DENSE = ('dense', 'student')  # runs that other libraries can run too


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
  found = findings.sweep(arguments, options, tables.say)
  out.mkdir(parents=True, exist_ok=True)
  if arguments.guarantee:
    # Before the long part: it can refuse the model.
    found.guarantee = guarantee.resampled(
      found.main, found.labels, ~found.fitted, arguments.epsilon,
      arguments.delta, arguments.draws,
    )  # fmt: skip
  if found.timed:
    tables.say(f'timing {len(found.timed)} settings')
    _time(arguments, found, tables)
  result = _write_tables(arguments, found, tables, out)
  _draw(arguments, found, tables, out)
  strict_json.write(out / 'result.json', result)
  tables.say(f'written: {out}')
  return result


def _time(arguments: Any, found: Findings, tables: Tables) -> None:
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


def _write_tables(
  arguments: Any, found: Findings, tables: Tables, out: pathlib.Path
) -> dict[str, Any]:
  """Prints and writes all tables; returns the main numbers."""
  rows = {
    setting.name: report_rows.setting_row(setting)
    for setting in found.everything
  }
  report_rows.write_csv(out / 'settings.csv', list(rows.values()))
  shown = found.timed or [
    *found.others.values(),
    *sweeps.choose(found.settings, 'auto', found.default.name, arguments.most),
  ]
  fitted = int(found.fitted.sum())
  tables.settings(
    [rows[setting.name] for setting in shown],
    found.metric,
    f'{len(shown)} of {len(rows)} settings (all: settings.csv)',
    fitted,
  )
  result: dict[str, Any] = {
    'workdir': arguments.workdir,
    'step': found.main.run.step,
    'split': found.main.run.split,
    'rows': len(found.labels),
    'temperatures': found.temperatures.source,
    'rows_fitted': fitted,
    'device': jax.devices()[0].device_kind,
    'metric': found.metric,
    'reference': found.reference.name,
    'length': pictures.spread(found.main.length),
    'settings': {setting.name: rows[setting.name] for setting in shown},
  }
  report_rows.write_csv(
    out / 'examples.csv',
    report_rows.example_rows(shown, found.labels, found.speed),
  )
  if found.speed is not None:
    result['speed'] = _speed(found, rows, tables, out)
  if 'dense' in found.others:
    result['fastest'] = _fastest(found, result.get('speed', {}), tables)
  if found.main.logits.shape[-1] > 1:
    result['calibration'] = _calibration(found, tables, out)
  if found.guarantee:
    result['guarantee'] = found.guarantee
    report_rows.write_csv(out / 'guarantee.csv', result['guarantee'])
    tables.guarantee(result['guarantee'])
  return result


def _speed(
  found: Findings, rows: Mapping[str, Any], tables: Tables, out: pathlib.Path
) -> dict[str, Any]:
  assert found.speed is not None
  limits = {
    setting.name: report_rows.flop_limit(
      setting, found.reference, found.speed.rows
    )
    for setting in found.timed
  }
  timings = [
    report_rows.speed_row(name, found.speed, found.reference.name)
    # Other libraries do not pad to our buckets.
    | {'flop_limit': limits.get(name)}
    for name in (*limits, *found.rivals)
  ]
  # The same model gives the same quality.
  rows = {**rows} | {
    name: rows[setting.name] for name, setting in found.rivals.items()
  }
  report_rows.write_csv(out / 'timings.csv', timings)
  tables.speed(timings, rows, found.metric, found.reference.name)
  differing = sum(found.speed.differing.values())
  if differing:
    tables.say(
      f'{differing} of {len(timings) * len(found.speed.rows)} answers differ '
      'from the recorded ones (timings.csv); a few at thresholds are rounding'
    )
  return {row['setting']: row for row in timings}


def _fastest(
  found: Findings, timings: Mapping[str, Any], tables: Tables
) -> list[dict[str, Any]]:
  dense = found.others['dense']
  rows = fastest.fastest(found.settings, dense, timings)
  tables.say(f'{fastest.line(rows, dense)}\n')
  return rows


def _calibration(
  found: Findings, tables: Tables, out: pathlib.Path
) -> Sequence[Mapping[str, Any]]:
  """On the rows that the temperatures were not fitted to."""
  main, judged, source = found.main, ~found.fitted, found.temperatures.source
  if not judged.any():
    tables.say(
      f'no calibration errors: all {len(judged)} rows served to fit the '
      f'temperatures ({source}); give other rows as --split\n'
    )
    return []
  rows = report_rows.calibration_rows(
    main.logits[:, judged], found.labels[judged], main.temperatures, main.heads
  )
  report_rows.write_csv(out / 'calibration.csv', rows)
  tables.calibration(rows, len(judged), source)
  return rows


def _draw(
  arguments: Any, found: Findings, tables: Tables, out: pathlib.Path
) -> None:
  """Writes all pictures; without matplotlib only the page."""
  chosen = found.default
  rows = sentences.pick(chosen, found.labels, arguments.sentences)
  title = f'{found.main.run.directory}, {chosen.name}'
  drawn = sentences.sentences(chosen, rows, found.labels)
  blocks = [sentence.block() for sentence in drawn]
  if blocks:
    text_pages.write_page(out / 'sentences', blocks, title=title)
  try:
    if blocks:
      text_pages.plot_page(out / 'sentences', blocks, title=title)
    _draw_numbers(found, out)
  except ImportError as error:
    tables.say(f'no pictures: {error}')


def _draw_numbers(found: Findings, out: pathlib.Path) -> None:
  main, chosen = found.main, found.default
  pictures.frontiers(
    out, found.everything, found.speed, found.metric, found.rivals
  )
  pictures.exits(out, found.settings, main)
  pictures.retention(out, main)
  judged = ~found.fitted
  if main.logits.shape[-1] > 1 and judged.any():
    pictures.reliability(out, main, found.labels, judged)
  if found.speed is not None and found.others:
    bars = {**found.others, findings.MAIN: chosen}
    timed = {setting.name for setting in found.timed}
    pictures.ablation(
      out,
      {name: one for name, one in bars.items() if one.name in timed},
      found.speed,
      found.metric,
    )
