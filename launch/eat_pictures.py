"""Pictures of the report of a trained EAT, from its measured numbers."""

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from eval_lib import (
  adaptive_plots,
  calibration,
  frontier,
  predictions,
  report,
  text_pages,
)
from launch.eat_runs import Model, Setting

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
  count: int,
) -> None:
  """Writes all pictures; without matplotlib only the page of sentences.

  `theirs` are the settings that other libraries ran, by candidate; `count`
  sentences are drawn as the default setting serves them.
  """
  title = {'title': f'{default.model.directory}, {default.name}'}
  plots = [
    *_frontiers(settings, timings, theirs),
    *_of_model(settings, default),
    *_ablation(settings, default, timings),
  ]
  if blocks := sentences(default, pick(default, count)):
    text_pages.write_page(out / 'sentences', blocks, **title)
    plots.append(('sentences', text_pages.plot_page, (blocks,), title))
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


def pick(setting: Setting, count: int) -> list[int]:
  """Returns rows of every exit, answered right and wrong, of all lengths.

  Those of median length come first, then shorter and longer ones.
  """
  rows = setting.rows
  order = np.argsort(rows['length'], kind='stable')
  wrong = (rows['answer'] != rows['label']) & (setting.model.classes > 1)
  group = (wrong * 100 + setting.point.exits)[order]
  ranked = [order[group == one] for one in np.unique(group)]
  chosen = [
    int(rows[int(share * (len(rows) - 1))])
    for share in (0.5, 0.2, 0.8, 0.35, 0.65)
    for rows in ranked
  ]
  return list(dict.fromkeys(chosen))[:count]


def sentences(setting: Setting, rows: Sequence[int]) -> list[text_pages.Block]:
  """Returns a block for each of some rows of the split."""
  model, blocks = setting.model, []
  names, tokenizer = model.policy.class_names, model.policy.reader.tokenizer
  heads = model.calibrated
  if names:
    heads = predictions.probabilities(heads)
  left = _positions(model, rows)
  for place, row in enumerate(rows):
    last, label = setting.point.exits[row], model.records['label'][row]
    layers = model.heads[: last + 1]
    block = text_pages.pruning_block(
      names=tokenizer.names(model.source.record(row)['tokens'].tolist()),
      # No pruning at the exit or after it was run.
      pruned={k: v[place] for k, v in left.items() if k < layers[-1]},
      heads=dict(zip(layers, heads[: last + 1, row], strict=True)),
      class_names=names,
      truth=names[int(label)] if names else f'{float(label):.2f}',
    )
    blocks.append(block)
  return blocks


def _positions(
  model: Model, rows: Sequence[int]
) -> dict[int, list[np.ndarray]]:
  """Returns positions of the tokens of rows left after each pruning."""
  names, module = ('tokens', 'token_types', 'length'), model.module
  inputs = [model.records[name][list(rows)] for name in names]
  found = {}
  for count, layer in enumerate(module.prune_layers, 1):
    layers, ratios = module.prune_layers[:count], module.prune_ratios[:count]
    part = module.clone(prune_layers=layers, prune_ratios=ratios)
    _, out = jax.jit(part.apply)(model.policy.chain.variables, *inputs)
    pairs = zip(*jax.device_get((out['positions'], out['length'])), strict=True)
    found[layer] = [places[:length] for places, length in pairs]
  return found
