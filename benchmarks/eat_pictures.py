"""Pictures of a trained EAT, of the tables of `benchmarks.eat`."""

import collections
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks import pictures
from benchmarks.exit_settings import OF_REGRESSIONS, SWEPT, Setting
from benchmarks.recorded_runs import Model
from eval_lib import calibration, report
from halting.row_rules import Never, RowRule, softmax


def draw(
  out: pathlib.Path,
  rows: report.Rows,
  tables: Mapping[str, report.Rows],
  default: Setting,
) -> None:
  """Draws the rows of all settings, and tables 'timings' and 'retention'."""
  model, ours = default.model, {row['setting']: row for row in rows}
  metric = f'{model.facts["metric"]} (%)'
  frontiers, bars = collections.defaultdict[Any, Any](dict), dict[str, Any]()
  for row in (*rows, *tables.get('timings', ())):
    name, batch = row.get('candidate', row.get('setting')), row.get('batch', 0)
    run_name, _, rule = name.rpartition('/')
    if not run_name:  # other libraries have curves of their own
      run_name = 'EAT' if name in ours else name
    if not batch:
      picture = 'frontier_flops', 'FLOPs at own length (% of dense)'
      cost = 100 * row['flops_share']
    elif batch == 1:
      picture = 'frontier', 'mean latency at batch 1 (ms)'
      cost = 1e3 * row['latency_mean']
    else:
      label = f'median time of a row at batch {batch} (ms)'
      picture = 'frontier_batch', label
      cost = report.Estimate(*(1e3 * x for x in row['seconds']))
    quality = 100 * row['quality']
    curve = frontiers[picture].setdefault(title_of(run_name), {})
    curve[short(rule)] = cost, quality
    is_trained = ours.get(name, {}).get('variant') == 'as trained'
    if batch and is_trained and ('/' in name or name == default.name):
      bar = bars.setdefault(title_of(run_name), {metric: quality})
      bar[f'speed-up at batch {batch}'] = row['speedup']
  for (file, label), curves in frontiers.items():
    pictures.plot_frontier(out / file, curves, label, metric)
  title, counted = 'Ablation', ablation(rows)
  if len(bars) < 2 < len(counted):  # nothing was timed
    title, bars = 'Compute and quality: median and range of seeds', counted
  if len(bars) > 1:
    pictures.plot_bars(out / 'ablation', bars, title)
  _draw_model(out, rows, tables['retention'], model)


def ablation(rows: report.Rows) -> Any:
  """Returns FLOPs and quality of the named runs as trained (EAT, Figure 3).

  Both are relative to the reference. Runs whose names differ in digits at their
  end are seeds, of which the median and the range are taken.
  """
  seeds = collections.defaultdict[str, list[tuple[float, float]]](list)
  for row in rows:
    name = row['setting'].rpartition('/')[0].rstrip('0123456789')
    if name and row['variant'] == 'as trained':
      seeds[name].append((100 * row['flops_share'], row['quality_difference']))
  columns = 'FLOPs (% of dense)', 'quality - reference (points)'
  return {
    name: {
      column: report.Estimate(float(np.median(of)), min(of), max(of))
      for column, of in zip(columns, zip(*values, strict=True), strict=True)
    }
    for name, values in seeds.items()
  }


def title_of(run: str) -> str:
  """Returns what a picture calls a run; `prune_0.5` has other prune ratios."""
  run = 'EAT unpruned' if run == 'prune_0' else run
  return run.replace('prune_', 'EAT, prune ratios x ')


def short(rule: str) -> str:
  """Shortens a name such as `confidence=0.9` for a point of a plot."""
  name, _, value = rule.partition('=')
  if name == 'never':
    return 'all layers'
  symbol = kind_of(name).SYMBOL or f'{name}='
  return f'{symbol}{value}' if value else name


def kind_of(name: str) -> type[RowRule]:
  """Returns the class of a rule by its name, the base for one of a user."""
  kinds: tuple[Any, ...] = (Never, *SWEPT, *OF_REGRESSIONS)
  return {kind.__name__.lower(): kind for kind in kinds}.get(name, RowRule)


def _draw_model(
  out: pathlib.Path, rows: report.Rows, retention: report.Rows, model: Model
) -> None:
  shares = {
    short(row['setting']): {
      f'layer {n}': 100 * row[f'exit_{n}'] for n in model.heads
    }
    for row in rows
    if '/' not in row['setting'] and kind_of(row['rule']).IS_DRAWN
  }
  pictures.plot_exits(out / 'exits', shares, 'Where rows exit')
  if layers := model.module.prune_layers:
    kept = model.records['length'], model.observed, layers, retention
    pictures.plot_retention(out / 'retention', *kept)
  judged, labels = model.judged, model.records['label']
  for place, layer in enumerate(model.heads if judged.any() else ()):
    tables = {}
    for scale in dict.fromkeys((1.0, model.policy.temperatures[place])):
      head = softmax(model.logits[place] / scale)
      table = calibration.reliability(head[judged], labels[judged])
      tables[f'temperature {scale:.3g}'] = table
    title = f'Head at layer {layer}, {judged.sum()} rows'
    pictures.plot_reliability(out / f'reliability_{layer}', tables, title)
