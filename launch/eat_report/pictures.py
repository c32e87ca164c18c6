"""Pictures of an EAT report, from its measured numbers."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eat.exits import reason
from eval_lib import adaptive_plots, calibration, predictions
from eval_lib.adaptive_plots import Curve
from eval_lib.timing import Estimate
from launch.eat_report.models import Model
from launch.eat_report.speed import Speed
from launch.eat_report.sweeps import Setting

# How a point is called that has little room for its name.
SHORT = {
  'confidence': 'P≥',
  'entropy': 'H≤',
  'margin': 'Δ≥',
  'patience': 'm=',
  'combined': 'm=2, P≥',
  'tolerance': '±',
}


def frontiers(
  out: pathlib.Path,
  settings: Sequence[Setting],
  speed: Speed | None,
  metric: str,
  rivals: Mapping[str, Setting],
) -> None:
  """Quality against FLOPs of all settings, against time of the timed ones.

  Args:
    out: the directory.
    settings: ours.
    speed: seconds of those that were timed, and of the rivals.
    metric: name of the quality.
    rivals: our settings that other libraries ran too, by their name for it.
  """
  quality = f'{metric} (%)'
  flops = {setting.name: 100 * setting.point.flops for setting in settings}
  adaptive_plots.plot_frontier(
    out / 'frontier_flops',
    _curves(settings, flops),
    cost='FLOPs at own length (% of the dense model)',
    quality=quality,
    title='Frontier, all settings, by formula',
  )
  if speed is None:
    return
  rows = len(speed.rows)
  milliseconds = {
    name: 1e3 * float(latency.mean()) for name, latency in speed.latency.items()
  }
  adaptive_plots.plot_frontier(
    out / 'frontier',
    _curves(settings, milliseconds) | _points(rivals, milliseconds),
    cost='mean latency at batch 1 (ms)',
    quality=quality,
    title='Frontier, measured',
  )
  together = {
    name: 1e3 * speed.together.estimate(name).median / rows
    for name in speed.latency
  }
  adaptive_plots.plot_frontier(
    out / 'frontier_batch',
    _curves(settings, together) | _points(rivals, together),
    cost=f'time per row at batch {speed.batch_size} (ms)',
    quality=quality,
    title='Frontier, measured',
  )


def _curves(
  settings: Sequence[Setting], cost: Mapping[str, float]
) -> dict[str, Curve]:
  """A curve for each run, and one for each variant; only what has a cost."""
  groups: dict[str, list[Setting]] = {}
  for setting in settings:
    if setting.name in cost:
      model = setting.model
      variant = f', {model.variant}' if model.variant else ''
      groups.setdefault(model.run.name + variant, []).append(setting)
  return {
    name: Curve(
      np.array([cost[setting.name] for setting in group]),
      np.array([100 * setting.point.quality for setting in group]),
      [_short(setting) for setting in group] if len(group) > 1 else (),
    )
    for name, group in groups.items()
  }


def _points(
  rivals: Mapping[str, Setting], cost: Mapping[str, float]
) -> dict[str, Curve]:
  return {
    name: Curve(np.array([cost[name]]), np.array([100 * setting.point.quality]))
    for name, setting in rivals.items()
  }


def _short(setting: Setting) -> str:
  if setting.value is None:
    return setting.rule.name
  is_regression = setting.model.logits.shape[-1] == 1
  rule = reason(setting.rule, is_regression)
  text = f'{SHORT[rule]}{setting.value:g}'
  veto = setting.rule.veto_margin
  return f'{text}, {SHORT["margin"]}{veto:g}' if veto else text


def exits(out: pathlib.Path, settings: Sequence[Setting], model: Model) -> None:
  """Where rows exit, by the confidence (or tolerance) and the patience."""
  shares = {
    setting.name: setting.point.shares
    for setting in settings
    if setting.model is model
    and setting.rule.name in ('never', 'confidence', 'patience')
    and not setting.rule.veto_margin
  }
  adaptive_plots.plot_exits(out / 'exits', shares, model.heads)


def retention(out: pathlib.Path, model: Model) -> None:
  """Tokens kept after each pruning, against the length."""
  if model.kept.shape[1]:
    adaptive_plots.plot_retention(
      out / 'retention', model.length, model.kept, model.module.prune_layers
    )


def reliability(
  out: pathlib.Path, model: Model, labels: np.ndarray, judged: np.ndarray
) -> None:
  """A picture for each head: before and after its temperature.

  Args:
    out: the directory.
    model: with its logits of all rows.
    labels: of all rows, `[N]`.
    judged: which of them count, bool `[N]`: none that it was fitted to.
  """
  before = predictions.probabilities(model.logits)
  after = predictions.probabilities(model.calibrated)
  for place, layer in enumerate(model.heads):
    temperature = model.temperatures[place]
    heads = {'T = 1': before[place]}
    if temperature != 1.0:
      heads[f'T = {temperature:.2f}'] = after[place]
    tables = {
      name: calibration.reliability(head, labels, mask=judged)
      for name, head in heads.items()
    }
    adaptive_plots.plot_reliability(
      out / f'reliability_{layer}',
      tables,
      title=f'Head at layer {layer}, {int(judged.sum())} rows',
    )


def ablation(
  out: pathlib.Path,
  settings: Mapping[str, Setting],
  speed: Speed,
  metric: str,
) -> None:
  """Quality and speed of each variant, by the name of its bar."""
  rows = len(speed.rows)
  bars: dict[str, dict[str, float | Estimate]] = {}
  for name, setting in settings.items():
    alone = speed.latency[setting.name].mean(1)
    together = speed.together.seconds[setting.name]
    bars[name] = {
      f'{metric} (%)': 100 * setting.point.quality,
      'mean latency, batch 1 (ms)': Estimate.of(1e3 * alone),
      f'rows per second, batch {speed.batch_size}': Estimate.of(
        rows / together
      ),
    }
  adaptive_plots.plot_ablation(out / 'ablation', bars)


def spread(values: Any) -> dict[str, float]:
  """Mean and percentiles of something that rows have, for result.json."""
  low, middle, high = np.quantile(values, (0.05, 0.5, 0.95)).tolist()
  mean = float(np.mean(values))
  return {'mean': mean, 'p5': low, 'p50': middle, 'p95': high}
