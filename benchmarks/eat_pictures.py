"""Pictures of a trained EAT, of the tables of `benchmarks.eat`."""

import collections
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks import pictures
from benchmarks.recorded_runs import Setting
from eval_lib import report
from halting.row_rules import Never, RowRule


def draw(
  out: pathlib.Path,
  settings: Mapping[str, Setting],
  rows: report.Rows,
  tables: Mapping[str, report.Rows],
  default: Setting,
) -> None:
  """Draws the rows of all settings, and tables 'timings' and 'retention'."""
  model, metric = default.model, f'{default.model.facts["metric"]} (%)'
  frontiers, bars = collections.defaultdict[Any, Any](dict), dict[str, Any]()
  for row in (*rows, *tables.get('timings', ())):
    name, batch = row.get('candidate', row.get('setting')), row.get('batch', 0)
    # Other libraries have curves of their own.
    setting = settings.get(name)
    title = title_of(name.rpartition('/')[0] or ('EAT' if setting else name))
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
    curve = frontiers[picture].setdefault(title, {})
    curve[short(setting.rule) if setting else name] = cost, quality
    is_trained = setting and not setting.model.variant
    if batch and is_trained and ('/' in name or name == default.name):
      bar = bars.setdefault(title, {metric: quality})
      bar[f'speed-up at batch {batch}'] = row['speedup']
  for (file, label), curves in frontiers.items():
    pictures.plot_frontier(out / file, curves, label, metric)
  title, counted = f'Ablation, exits: {short(default.rule)}', ablation(rows)
  if len(bars) < 2 < len(counted):  # nothing was timed
    title, bars = 'Compute and quality: median and range of seeds', counted
  if len(bars) > 1:
    pictures.plot_bars(out / 'ablation', bars, title)
  shares = {
    short(setting.rule): {
      f'layer {layer}': 100 * share
      for layer, share in zip(model.heads, setting.point.shares, strict=True)
    }
    for name, setting in settings.items()
    if '/' not in name and setting.rule.IS_DRAWN
  }
  pictures.plot_exits(out / 'exits', shares, 'Where rows exit')
  if layers := model.module.prune_layers:
    lengths, retention = model.records['length'], tables['retention']
    path = out / 'retention'
    pictures.plot_retention(path, lengths, model.observed, layers, retention)


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


def short(rule: RowRule) -> str:
  """Shortens a rule such as `confidence=0.9` for a point of a plot."""
  if isinstance(rule, Never):
    return 'all layers'
  if not rule.KNOB:
    return rule.name
  value = getattr(rule, rule.KNOB)
  few = float(f'{value:.3g}')
  # No two points of a sweep have one name.
  value = value if {value, few} & {*rule.SWEEP} else few
  return f'{rule.SYMBOL or f"{rule.name}="}{value:g}'
