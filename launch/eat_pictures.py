"""Pictures of the report of a trained EAT, from its measured numbers.

frontier_flops, frontier and frontier_batch (quality against FLOPs and time),
exits, retention, reliability_<layer>, ablation, and sentences (also as a page).
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from eat.model import EatClassifier
from eval_lib import (
  adaptive_plots,
  calibration,
  predictions,
  report,
  text_pages,
)
from eval_lib.adaptive_plots import Curve
from launch.eat_models import Model
from launch.eat_settings import Setting

# Names of points that have little room.
SHORT = {
  'confidence': 'P≥',
  'entropy': 'H≤',
  'margin': 'Δ≥',
  'patience': 'm=',
  'tolerance': '±',
}


def draw(
  out: pathlib.Path,
  settings: Sequence[Setting],
  default: Setting,
  timings: report.Rows,
  theirs: Mapping[str, Setting],
  count: int,
) -> None:
  """Writes all pictures; without matplotlib only the page of sentences.

  Args:
    out: the directory.
    settings: of all runs.
    default: the setting that the EAT is served with by default.
    timings: of the timed settings; () without.
    theirs: the settings that other libraries ran, by candidate.
    count: sentences.
  """
  model = default.model
  title = f'{model.directory}, {default.name}'
  rows = pick(default, count)
  blocks = [
    text_pages.pruning_block(**one)
    for one in (sentences(default, rows) if rows else ())
  ]
  if blocks:
    text_pages.write_page(out / 'sentences', blocks, title=title)
  try:
    _frontiers(out, settings, timings, theirs)
    if blocks:
      text_pages.plot_page(out / 'sentences', blocks, title=title)
    shares = {
      one.name: one.point.shares
      for one in settings
      if one.model is model and one.rule.name in ('never', 'confidence',
                                                  'patience')
    }  # fmt: skip
    adaptive_plots.plot_exits(out / 'exits', shares, model.heads)
    if model.kept.shape[1]:
      layers = model.module.prune_layers
      adaptive_plots.plot_retention(
        out / 'retention', model.length, model.kept, layers
      )
    _reliability(out, model)
    _ablation(out, settings, default, timings)
  except ImportError as error:
    print(f'no pictures: {error}')


def _frontiers(
  out: pathlib.Path,
  settings: Sequence[Setting],
  timings: report.Rows,
  theirs: Mapping[str, Setting],
) -> None:
  """Draws quality against FLOPs of all settings, against time of the timed."""
  flops = {one.name: 100 * one.point.flops for one in settings}
  label = 'FLOPs at own length (% of the dense model)'
  pictures = {'frontier_flops': (flops, label)}
  for row in timings:
    name, label = 'frontier', 'mean latency at batch 1 (ms)'
    if row['batch'] > 1:
      name = 'frontier_batch'
      label = f'median time of a row at batch {row["batch"]} (ms)'
    seconds = row.get('latency_mean', row['seconds'].median)
    cost, _ = pictures.setdefault(name, ({}, label))
    cost[row['candidate']] = 1e3 * seconds
  for name, (cost, label) in pictures.items():
    curves: dict[str, list[tuple[float, float, str]]] = {}
    for one in settings:
      if one.name in cost:
        variant = f', {one.model.variant}' if one.model.variant else ''
        point = cost[one.name], 100 * one.point.quality, short(one)
        curves.setdefault(one.model.name + variant, []).append(point)
    for peer, one in theirs.items():
      if peer in cost:
        curves[peer] = [(cost[peer], 100 * one.point.quality, '')]
    adaptive_plots.plot_frontier(
      out / name,
      {name: _curve(points) for name, points in curves.items()},
      cost=label,
      quality=f'{settings[0].model.metric} (%)',
    )


def _curve(points: Sequence[tuple[float, float, str]]) -> Curve:
  """Returns the curve of points; a single one needs no label."""
  cost, quality, labels = zip(*points, strict=True)
  return Curve(
    np.array(cost), np.array(quality), labels if len(labels) > 1 else ()
  )


def short(setting: Setting) -> str:
  """Returns a name for a point of a plot."""
  rule, value = setting.point.rule, setting.point.value
  return rule if value is None else f'{SHORT[rule]}{value:g}'


def _reliability(out: pathlib.Path, model: Model) -> None:
  """Draws each head before and after its temperature, of the judged rows."""
  judged = ~model.fitted
  if model.classes == 1 or not judged.any():
    return
  after = predictions.probabilities(model.calibrated)
  before = predictions.probabilities(model.logits)
  for place, layer in enumerate(model.heads):
    temperature = model.policy.temperatures[place]
    heads = {'T = 1': before[place]}
    if temperature != 1.0:
      heads[f'T = {temperature:.2f}'] = after[place]
    tables = {
      name: calibration.reliability(head, model.labels, mask=judged)
      for name, head in heads.items()
    }
    adaptive_plots.plot_reliability(
      out / f'reliability_{layer}',
      tables,
      title=f'Head at layer {layer}, {int(judged.sum())} rows',
    )


def _ablation(
  out: pathlib.Path,
  settings: Sequence[Setting],
  default: Setting,
  timings: report.Rows,
) -> None:
  """Draws quality and time of the other runs and of the default setting."""
  bars: dict[str, dict[str, Any]] = {}
  by_name = {
    one.name: one
    for one in settings
    if one.model.name != default.model.name or one is default
  }
  for row in timings:
    if row['candidate'] in by_name:
      one = by_name[row['candidate']]
      quality = {f'{one.model.metric} (%)': 100 * one.point.quality}
      bar = bars.setdefault(one.model.name, quality)
      bar[f'speed-up at batch {row["batch"]}'] = row['speedup']
  if len(bars) > 1:
    adaptive_plots.plot_ablation(out / 'ablation', bars)


def pick(setting: Setting, count: int) -> list[int]:
  """Returns rows of every exit, answered right and wrong, of all lengths.

  Those of median length come first, then shorter and longer ones.
  """
  length, labels = setting.model.length, setting.model.labels
  wrong = np.zeros(len(length), bool)
  if setting.chosen.shape[1] > 1:
    wrong = setting.chosen.argmax(-1) != labels
  groups = [
    np.flatnonzero((setting.exits == head) & (wrong == is_wrong))
    for is_wrong in (False, True)
    for head in range(len(setting.model.heads))
  ]
  ranked = [rows[np.argsort(length[rows], kind='stable')] for rows in groups]
  chosen = [
    int(rows[int(share * (len(rows) - 1))])
    for share in (0.5, 0.2, 0.8, 0.35, 0.65)
    for rows in ranked
    if len(rows)
  ]
  return list(dict.fromkeys(chosen))[:count]


def sentences(setting: Setting, rows: Sequence[int]) -> list[dict[str, Any]]:
  """Returns arguments of `pruning_block` for rows of the split."""
  model = setting.model
  names, tokenizer = model.policy.class_names, model.policy.reader.tokenizer
  probabilities = model.calibrated
  if names:
    probabilities = predictions.probabilities(probabilities)
  result = []
  for row, places in zip(rows, positions(model, rows), strict=True):
    last = int(setting.exits[row])
    layers, label = model.heads[: last + 1], model.labels[row]
    tokens = model.source.record(int(row))['tokens'].tolist()
    result.append(
      dict(
        names=tokenizer.names(tokens),
        # No pruning at the exit or after it was run.
        pruned={k: v for k, v in places.items() if k < layers[-1]},
        heads=dict(zip(layers, probabilities[: last + 1, row], strict=True)),
        class_names=names,
        truth=names[int(label)] if names else f'{float(label):.2f}',
      )
    )
  return result


def positions(model: Model, rows: Sequence[int]) -> list[dict[int, np.ndarray]]:
  """Returns positions of the tokens left after each pruning, for each row."""
  inputs = [
    model.records[name][list(rows)]
    for name in ('tokens', 'token_types', 'length')
  ]

  def run(module: EatClassifier, *inputs: Any) -> Any:
    state, found, first = module.embed(*inputs), {}, 1
    for layer in module.prune_layers:
      state = module.encode(state, first, layer).tokens
      found[layer] = state.positions, state.length
      first = layer + 1
    return found

  apply = jax.jit(lambda v, *x: model.module.apply(v, *x, method=run))
  found = jax.device_get(apply(model.chain.variables, *inputs))
  return [
    {layer: place[n, : length[n]] for layer, (place, length) in found.items()}
    for n in range(len(rows))
  ]
