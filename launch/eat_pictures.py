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
from eval_lib import adaptive_plots, calibration, predictions, text_pages
from eval_lib.adaptive_plots import Curve
from launch.eat_runs import Model
from launch.eat_settings import Setting
from launch.eat_timing import Speed

# Names of points that have little room.
SHORT = {
  'confidence': 'P≥',
  'entropy': 'H≤',
  'margin': 'Δ≥',
  'patience': 'm=',
  'combined': 'm=2, P≥',
  'tolerance': '±',
}


def draw(
  out: pathlib.Path,
  settings: Sequence[Setting],
  default: Setting,
  speed: Speed | None,
  count: int,
) -> None:
  """Writes all pictures; without matplotlib only the page of sentences.

  Args:
    out: the directory.
    settings: of all runs.
    default: the setting that the EAT is served with by default.
    speed: of the timed settings; None without.
    count: sentences.
  """
  model = default.model
  title = f'{model.run.directory}, {default.name}'
  rows = pick(default, count)
  blocks = [
    text_pages.pruning_block(**one)
    for one in (sentences(default, rows) if rows else ())
  ]
  if blocks:
    text_pages.write_page(out / 'sentences', blocks, title=title)
  try:
    _frontiers(out, settings, speed)
    if blocks:
      text_pages.plot_page(out / 'sentences', blocks, title=title)
    shares = {
      one.name: one.point.shares
      for one in settings
      if one.model is model
      and one.rule.name in ('never', 'confidence', 'patience')
      and not one.rule.veto_margin
    }
    adaptive_plots.plot_exits(out / 'exits', shares, model.heads)
    if model.kept.shape[1]:
      layers = model.module.prune_layers
      adaptive_plots.plot_retention(
        out / 'retention', model.length, model.kept, layers
      )
    _reliability(out, model)
    if speed is not None:
      _ablation(out, settings, default, speed)
  except ImportError as error:
    print(f'no pictures: {error}')


def _frontiers(
  out: pathlib.Path, settings: Sequence[Setting], speed: Speed | None
) -> None:
  """Draws quality against FLOPs of all settings, against time of the timed."""
  flops = {one.name: 100 * one.point.flops for one in settings}
  label = 'FLOPs at own length (% of the dense model)'
  pictures = {'frontier_flops': (flops, label)}
  if speed is not None:
    for row in speed.table:
      batch = row['batch']
      name = 'frontier' if batch == 1 else 'frontier_batch'
      label = f'median time of a row at batch {batch} (ms)'
      if batch == 1:
        label = 'mean latency at batch 1 (ms)'
      seconds = row.get('latency_mean', row['seconds'].median)
      cost, _ = pictures.setdefault(name, ({}, label))
      cost[row['candidate']] = 1e3 * seconds
  metric = settings[0].model.run.metric()[0]
  for name, (cost, label) in pictures.items():
    curves = _curves(settings, cost)
    for peer, one in (speed.peers if speed else {}).items():
      if peer in cost:
        point = np.array([cost[peer]]), np.array([100 * one.point.quality])
        curves[peer] = Curve(*point)
    adaptive_plots.plot_frontier(
      out / name, curves, cost=label, quality=f'{metric} (%)'
    )


def _curves(
  settings: Sequence[Setting], cost: Mapping[str, float]
) -> dict[str, Curve]:
  """Returns a curve for each run and variant of settings that have a cost."""
  groups: dict[str, list[Setting]] = {}
  for one in settings:
    if one.name in cost:
      variant = f', {one.model.variant}' if one.model.variant else ''
      groups.setdefault(one.model.run.name + variant, []).append(one)
  return {
    name: Curve(
      np.array([cost[one.name] for one in group]),
      np.array([100 * one.point.quality for one in group]),
      [short(one) for one in group] if len(group) > 1 else (),
    )
    for name, group in groups.items()
  }


def short(setting: Setting) -> str:
  """Returns a name for a point of a plot."""
  if setting.value is None:
    return setting.rule.name
  text = f'{SHORT[setting.reason]}{setting.value:g}'
  veto = setting.rule.veto_margin
  return f'{text}, {SHORT["margin"]}{veto:g}' if veto else text


def _reliability(out: pathlib.Path, model: Model) -> None:
  """Draws each head before and after its temperature, of the judged rows."""
  run, judged = model.run, ~model.run.fitted
  if model.logits.shape[-1] == 1 or not judged.any():
    return
  after = predictions.probabilities(model.calibrated)
  before = predictions.probabilities(model.logits)
  for place, layer in enumerate(model.heads):
    temperature = run.policy.temperatures[place]
    heads = {'T = 1': before[place]}
    if temperature != 1.0:
      heads[f'T = {temperature:.2f}'] = after[place]
    tables = {
      name: calibration.reliability(head, run.records['label'], mask=judged)
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
  speed: Speed,
) -> None:
  """Draws quality and time of the other runs and of the default setting."""
  metric = default.model.run.metric()[0]
  names = {
    one.name: one.model.run.name
    for one in settings
    if one.model.run is not default.model.run or one is default
  }
  quality = {one.name: 100 * one.point.quality for one in settings}
  bars: dict[str, dict[str, Any]] = {}
  for row in speed.table:
    if row['candidate'] in names:
      bar = bars.setdefault(
        names[row['candidate']], {f'{metric} (%)': quality[row['candidate']]}
      )
      bar[f'speed-up at batch {row["batch"]}'] = row['speedup']
  if len(bars) > 1:
    adaptive_plots.plot_ablation(out / 'ablation', bars)


def pick(setting: Setting, count: int) -> list[int]:
  """Returns rows of every exit, answered right and wrong, of all lengths.

  Those of median length come first, then shorter and longer ones.
  """
  length, labels = setting.model.length, setting.model.run.records['label']
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
  model, run = setting.model, setting.model.run
  names, tokenizer = run.policy.class_names, run.policy.reader.tokenizer
  probabilities = model.calibrated
  if names:
    probabilities = predictions.probabilities(probabilities)
  result = []
  for row, places in zip(rows, positions(model, rows), strict=True):
    last = int(setting.exits[row])
    layers, label = model.heads[: last + 1], run.records['label'][row]
    tokens = run.source.record(int(row))['tokens'].tolist()
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
    model.run.records[name][list(rows)]
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
  found = jax.device_get(apply(model.run.chain.variables, *inputs))
  return [
    {layer: place[n, : length[n]] for layer, (place, length) in found.items()}
    for n in range(len(rows))
  ]
