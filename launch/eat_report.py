"""Quality and speed of a trained EAT: `launch.benchmark eat`.

Every model is run once over the split; exit rules, thresholds, veto margins
and prune ratios are swept over the recorded logits. The chosen settings
(`--time`) are then timed through the engine, in turns with the dense run and
the student: rows alone, and in full batches. Tokenising is not timed. `flops`
are by formula for the length of each row, `flops_served` for its length bucket,
which the engine runs and to which the FLOP limit belongs. Calibration errors
are those of the rows that the temperatures were not fitted to. Written into
`--out`:

  settings.csv     quality, depth, retention and FLOPs of all settings
  timings.csv      latency and throughput of the timed ones
  examples.csv     each row with each timed setting
  calibration.csv  ECE of each head before and after its temperature
  guarantee.csv    with --guarantee: how often the guaranteed threshold fails
  result.json      the main numbers, with --dense the fastest settings that
                   lose at most 0.5, 1 and 2 points against it
  *.png, *.pdf     see `launch.eat_pictures`
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from eval_lib import report
from launch import eat_pictures, eat_runs, eat_settings, eat_timing
from launch.eat_runs import Run
from launch.eat_settings import Setting
from launch.eat_timing import Speed
from serve_lib.process import keep_freed_memory
from train_lib import strict_json

POINTS = (0.5, 1.0, 2.0)  # percentage points of quality that may be lost
_ROUNDING = 1e-9  # of qualities, so that exactly a point is within a point


@dataclasses.dataclass(frozen=True)
class Report:
  """The settings of a report.

  Attributes:
    settings: those of the EAT and its variants.
    others: the one setting of each other run, by the run's name.
    default: the setting that the EAT is served with by default.
    timed: the settings to time, the reference of the speed-ups first.
  """

  settings: list[Setting]
  others: dict[str, Setting]
  default: Setting
  timed: list[Setting]

  @property
  def everything(self) -> list[Setting]:
    """All settings of all runs."""
    return [*self.others.values(), *self.settings]


def write(given: Mapping[str, Any]) -> dict[str, Any]:
  """Writes and prints the report; returns its tables.

  Args:
    given: the flags of the command.

  Raises:
    ConfigError: a flag does not fit the run, or a run has other rows.
    InvalidDataError: the labels are hidden, or a guarantee is impossible.
  """
  keep_freed_memory()
  made = sweep(given)
  model, out = made.default.model, pathlib.Path(given['out'])
  out.mkdir(parents=True, exist_ok=True)
  tables: dict[str, Any] = {}
  if given['guarantee']:  # before the long part: it can refuse the model
    tables['guarantee'] = eat_settings.guarantee(model, given)
  speed = None
  if made.timed:
    print(f'timing {len(made.timed)} settings', flush=True)
    dense = [made.others[k] for k in ('dense', 'student') if k in made.others]
    speed = eat_timing.measure(made.timed, dense, given)
    tables['timings'] = speed.table
  shown = made.timed or [
    *made.others.values(),
    *eat_settings.choose(
      made.settings, 'auto', made.default.name, given['most']
    ),
  ]
  tables['settings'] = [setting_row(one) for one in made.everything]
  tables['calibration'] = eat_settings.calibration_rows(model)
  if 'dense' in made.others:
    tables['fastest'] = fastest(made, speed)
  examples = [row for one in shown for row in example_rows(one, speed)]
  for name, rows in {**tables, 'examples': examples}.items():
    if rows and name != 'fastest':
      report.write_csv(out / f'{name}.csv', rows)
  names = {one.name for one in shown}
  of_shown = [row for row in tables['settings'] if row['setting'] in names]
  tables['settings'] = of_shown
  strict_json.write(out / 'result.json', _facts(made) | _plain(tables))
  show(tables, made)
  eat_pictures.draw(
    out, made.everything, made.default, speed, given['sentences']
  )
  print(f'written: {out}')
  return tables


def sweep(given: Mapping[str, Any]) -> Report:
  """Records all models and measures all settings on their logits."""
  split, limit, tau = given['split'], given['limit'], given['tau']
  run = eat_runs.load(
    'EAT', given['workdir'], split, limit, '--workdir', given['step']
  )
  print(
    f'{run.directory}, step {run.step}: {len(run.fitted)} rows of split '
    f'{run.split}, {jax.devices()[0].device_kind}'
  )
  others: dict[str, Run] = {}
  compared = [(name, given[name]) for name in ('dense', 'student')]
  for name, directory in (*compared, *given['ablation']):
    if directory:
      flag = f'--{name}' if name in ('dense', 'student') else '--ablation'
      others[name] = eat_runs.load(name, directory, split, limit, flag)
      eat_runs.check_same_rows(run, others[name], flag)
  recorded = [
    eat_runs.record(run, name, module)
    for name, module in eat_runs.variants(
      run.chain.model, given['prune_scales']
    ).items()
  ]
  models = {
    name: eat_runs.record(other, '', other.chain.model)
    for name, other in others.items()
  }
  full = models.get('dense', recorded[0]).dense_flops()
  settings = [
    setting
    for model in recorded
    for setting in eat_settings.measure(
      model, eat_settings.rules(model, tau), full
    )
  ]
  single = {}
  for name, model in models.items():
    rule = eat_settings.default_name(model, tau)
    chosen = {rule: eat_settings.rules(model, tau)[rule]}
    [single[name]] = eat_settings.measure(model, chosen, full, f'{name}/')
  names = {setting.name: setting for setting in settings}
  default = names[eat_settings.default_name(recorded[0], tau)]
  timed = eat_settings.choose(
    settings, given['time'], default.name, given['most']
  )
  if timed:
    reference = single.get('dense', names['never'])
    extra = [default] if given['ablation'] else []
    every = [reference, *single.values(), *extra, *timed]
    timed = list({one.name: one for one in every}.values())
  return Report(settings, single, default, timed)


def setting_row(setting: Setting) -> dict[str, Any]:
  """Returns means over the rows; `agreement` is with the own last head."""
  point, model, rule = setting.point, setting.model, setting.rule
  patient = rule.name in ('patience', 'combined')
  mean = {name: float(values.mean()) for name, values in setting.rows.items()}
  return dict(
    setting=setting.name, run=model.run.directory,
    variant=model.variant or 'as trained', rule=setting.reason,
    value=point.value, patience=rule.patience if patient else None,
    veto_margin=rule.veto_margin or None, quality=point.quality,
    agreement=point.agreement if len(model.heads) > 1 else None,
    depth=point.depth, retention=mean['retention'], flops=mean['flops'],
    flops_share=point.flops, flops_served=mean['flops_served'],
    early=1.0 - point.shares[-1],
  ) | {
    f'exit_{layer}': share
    for layer, share in zip(model.heads, point.shares, strict=True)
  }  # fmt: skip


def example_rows(setting: Setting, speed: Speed | None) -> list[dict[str, Any]]:
  """Returns a line for each row of the split.

  `kept_<layer>` are the tokens left after the pruning at that layer, None if
  the row left before it; the latency is None if it was not timed.
  """
  model, rows = setting.model, setting.rows
  is_class = model.logits.shape[-1] > 1
  latency: dict[int, float] = {}
  if speed is not None:
    means = speed.latency[setting.name].mean(0)
    latency = dict(zip(speed.rows.tolist(), means.tolist(), strict=True))
  result = []
  for row in range(len(rows['label'])):
    line = {name: values[row].item() for name, values in rows.items()}
    is_last = setting.exits[row] == len(model.heads) - 1
    line['exit_reason'] = 'last layer' if is_last else setting.reason
    right = int(line['answer'] == line['label'])
    line['correct'] = right if is_class else None
    line['latency'] = latency.get(row)
    kept = zip(model.module.prune_layers, model.kept[row].tolist(), strict=True)
    # The pruning at the layer of a head comes after the head.
    line |= {f'kept_{at}': n if at < line['depth'] else None for at, n in kept}
    result.append({'setting': setting.name, 'index': row, **line})
  return result


def fastest(made: Report, speed: Speed | None) -> list[dict[str, Any]]:
  """Returns the fastest setting for each number of points that may be lost.

  By the speed-up at batch 1, or without times by FLOPs as served. It is chosen
  by the rows that its quality is measured on, so of many settings that lose
  about as much the luckiest one wins.
  """
  dense, result = made.others['dense'], []
  timed: dict[str, dict[str, float]] = {}
  for row in speed.table if speed else ():
    name = 'speedup_batch_1' if row['batch'] == 1 else 'speedup_batch'
    timed.setdefault(row['candidate'], {})[name] = row['speedup'].median
  known = [one for one in made.settings if not timed or one.name in timed]
  total = dense.rows['flops_served'].sum()
  shares = {one.name: one.rows['flops_served'].sum() / total for one in known}

  def slowness(setting: Setting) -> float:
    times = timed.get(setting.name)
    return -times['speedup_batch_1'] if times else shares[setting.name]

  for points in POINTS:
    least = dense.point.quality - points / 100 - _ROUNDING
    good = [one for one in known if one.point.quality >= least]
    row = {'points': points, 'setting': None}
    if good:
      best = min(good, key=slowness)
      row |= {
        'setting': best.name,
        'quality': best.point.quality,
        'flops_served_share': float(shares[best.name]),
        **timed.get(best.name, {}),
      }
    result.append(row)
  return result


def _facts(made: Report) -> dict[str, Any]:
  run, length = made.default.model.run, made.default.model.length
  low, middle, high = np.quantile(length, (0.05, 0.5, 0.95)).tolist()
  return {
    'workdir': run.directory,
    'step': run.step,
    'split': run.split,
    'rows': len(length),
    'temperatures': run.calibrated_by,
    'rows_fitted': int(run.fitted.sum()),
    'device': jax.devices()[0].device_kind,
    'metric': run.metric()[0],
    'reference': made.timed[0].name if made.timed else None,
    'length': dict(mean=float(length.mean()), p5=low, p50=middle, p95=high),
  }


def _plain(tables: Mapping[str, Any]) -> dict[str, Any]:
  """Returns tables without `Estimate`, for JSON."""
  return {
    name: [report.flat(row) for row in rows] for name, rows in tables.items()
  }


SHOWN = {
  'settings': 'setting quality agreement depth retention flops flops_share '
  'flops_served early',
  'timings': 'batch candidate seconds latency_mean latency_p50 latency_p95 '
  'speedup limit '
  'share differing_rows',
  'calibration': 'layer accuracy temperature ece ece_calibrated rows',
  'guarantee': 'loss epsilon exceeded delta mean worst threshold early draws '
  'rows',
  'fastest': 'points setting quality flops_served_share speedup_batch_1 '
  'speedup_batch',
}


def show(tables: Mapping[str, Any], made: Report) -> None:
  """Prints the tables of result.json."""
  facts = _facts(made)
  notes = {
    'settings': f'{len(made.everything)} settings in settings.csv; quality: '
    f'{facts["metric"]}; {facts["rows_fitted"]} of {facts["rows"]} rows also '
    'served to fit the temperatures',
    'timings': f'speed-up over {facts["reference"]}; limit: the same of FLOPs, '
    'both padded to the length bucket; median [quartiles] of the turns',
    'calibration': f'temperatures: {facts["temperatures"]}; of the rows that '
    'they were not fitted to',
    'guarantee': 'risk <= epsilon with probability 1 - delta, resampled',
    'fastest': 'fastest settings by the points of quality lost at most against '
    'the dense run, chosen on these rows',
  }
  for name, columns in SHOWN.items():
    if tables.get(name):
      rows = [report.readable(row, columns.split()) for row in tables[name]]
      report.print_table(f'{name}: {notes[name]}', rows)
