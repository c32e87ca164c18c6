"""Pictures of the report of a trained EAT, from its measured numbers."""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from eval_lib import (
  adaptive_plots,
  calibration,
  frontier,
  predictions,
  report,
)
from launch.eat_runs import Setting

# Names of points that have little room.
SHORT = {'confidence': 'P≥', 'entropy': 'H≤', 'margin': 'Δ≥', 'patience': 'm=',
         'tolerance': '±'}  # fmt: skip
Plot = tuple[str, Any, tuple[Any, ...], dict[str, Any]]  # file, function, data


def draw(
  out: pathlib.Path,
  settings: Mapping[str, Setting],
  default: Setting,
  timings: report.Rows,
  theirs: Mapping[str, Setting],
) -> None:
  """Writes all pictures, if matplotlib is installed.

  `theirs` are the settings that other libraries ran, by candidate.
  """
  plots = [
    *_frontiers(settings, timings, theirs),
    *_of_model(settings, default),
    *_ablation(settings, default, timings),
  ]
  try:
    for name, plot, data, options in plots:
      plot(out / name, *data, **options)
  except ImportError as error:
    print(f'no pictures: {error}')


def _frontiers(
  settings: Mapping[str, Setting],
  timings: report.Rows,
  theirs: Mapping[str, Setting],
) -> Iterator[Plot]:
  """Yields quality against FLOPs of all settings, against time of the timed."""
  costs = {name: 100 * one.point.flops for name, one in settings.items()}
  pictures = {'frontier_flops': (costs, 'FLOPs at own length (% of dense)')}
  for row in timings:
    name, label = 'frontier', 'mean latency at batch 1 (ms)'
    if row['batch'] > 1:
      name = 'frontier_batch'
      label = f'median time of a row at batch {row["batch"]} (ms)'
    seconds = row.get('latency_mean', row['seconds'].median)
    pictures.setdefault(name, ({}, label))[0][row['candidate']] = 1e3 * seconds
  for name, (costs, label) in pictures.items():
    points: dict[str, dict[str, tuple[float, float]]] = {}
    for key, cost in costs.items():
      one = theirs.get(key) or settings[key]
      own = ', '.join(filter(None, [one.model.name, one.model.variant]))
      curve = points.setdefault(key if key in theirs else own, {})
      curve[short(one)] = cost, 100 * one.point.quality
    curves = {}
    for title, places in points.items():
      x, y = np.array([*places.values()]).T
      labels = [*places] if len(places) > 1 else ()
      curves[title] = adaptive_plots.Curve(x, y, labels)
    metric, _ = frontier.main_number(next(iter(settings.values())).model.task)
    options = {'cost': label, 'quality': f'{metric} (%)'}
    yield name, adaptive_plots.plot_frontier, (curves,), options


def short(setting: Setting) -> str:
  """Returns a name for a point of a plot."""
  rule, value = setting.point.rule, setting.point.value
  return rule if value is None else f'{SHORT[rule]}{value:g}'


def _of_model(
  settings: Mapping[str, Setting], default: Setting
) -> Iterator[Plot]:
  """Yields exits, retention by length, and the reliability of each head."""
  model, rules = default.model, ('never', 'confidence', 'patience')
  shares = {
    name: one.point.shares
    for name, one in settings.items()
    if one.model is model and one.rule.name in rules
  }
  yield 'exits', adaptive_plots.plot_exits, (shares, model.heads), {}
  if layers := model.module.prune_layers:
    data = model.records['length'], model.kept, layers
    yield 'retention', adaptive_plots.plot_retention, data, {}
  judged, labels = model.judged, model.records['label']
  for place, layer in enumerate(model.heads if judged.any() else ()):
    scales = dict.fromkeys((1.0, model.policy.temperatures[place]))
    tables = {}
    for scale in scales:
      head = predictions.probabilities(model.logits / scale)[place]
      table = calibration.reliability(head, labels, mask=judged)
      tables[f'T = {scale:.3g}'] = table
    title = {'title': f'Head at layer {layer}, {judged.sum()} rows'}
    plot = adaptive_plots.plot_reliability
    yield f'reliability_{layer}', plot, (tables,), title


def _ablation(
  settings: Mapping[str, Setting], default: Setting, timings: report.Rows
) -> Iterator[Plot]:
  """Yields quality and time of the other runs and of the default setting."""
  bars: dict[str, dict[str, Any]] = {}
  for row in timings:
    one = settings.get(row['candidate'])
    if one and (one is default or one.model.name != default.model.name):
      metric, _ = frontier.main_number(one.model.task)
      bar = bars.setdefault(one.model.name, {})
      bar[f'{metric} (%)'] = 100 * one.point.quality
      bar[f'speed-up at batch {row["batch"]}'] = row['speedup']
  if len(bars) > 1:
    yield 'ablation', adaptive_plots.plot_ablation, (bars,), {}
