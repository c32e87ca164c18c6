"""What an EAT report writes as CSV: plain FLOPs, seconds and shares."""

import csv
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dataset_lib import atomic_file
from eat.exits import reason
from eval_lib import calibration
from launch.eat_report.speed import Speed
from launch.eat_report.sweeps import Setting

PATIENT = ('patience', 'combined')  # rules that count agreeing heads


def setting_row(setting: Setting) -> dict[str, Any]:
  """What a setting gives: means over the rows.

  `flops` are those of the rows' own lengths and `flops_share` their share of
  the dense model's, `flops_served` those of their length buckets, which the
  engine runs. `agreement` is with the model's own last head, and None for a
  model that has no other.
  """
  point, model, rule = setting.point, setting.model, setting.rule
  is_regression = model.logits.shape[-1] == 1
  return {
    'setting': setting.name,
    'run': model.run.directory,
    'variant': model.variant or 'as trained',
    'rule': reason(rule, is_regression),
    'value': point.value,
    'patience': rule.patience if rule.name in PATIENT else None,
    'veto_margin': rule.veto_margin or None,
    'quality': point.quality,
    'agreement': point.agreement if len(model.heads) > 1 else None,
    'depth': point.depth,
    'retention': float(setting.retention.mean()),
    'flops': float(setting.flops.mean()),
    'flops_share': point.flops,
    'flops_served': float(setting.flops_served.mean()),
    'early': 1.0 - point.shares[-1],
  } | {
    f'exit_{layer}': share
    for layer, share in zip(model.heads, point.shares, strict=True)
  }


def speed_row(name: str, speed: Speed, reference: str) -> dict[str, Any]:
  """Latency and throughput of a setting, in seconds and rows a second.

  Speed-ups over the reference are medians over repeats, paired.
  """
  rows, latency = len(speed.rows), speed.latency[name]
  together = speed.together.estimate(name)
  result: dict[str, Any] = {
    'setting': name,
    'rows': rows,
    'repeats': len(latency),
    'batch_size': speed.batch_size,
    'latency_mean': float(latency.mean()),
    'latency_p50': float(np.quantile(latency, 0.5)),
    'latency_p95': float(np.quantile(latency, 0.95)),
    'throughput': rows / together.median,
    'throughput_low': rows / together.high,
    'throughput_high': rows / together.low,
    'differing_rows': speed.differing[name],
  }
  for kind, timings in (('batch_1', speed.alone), ('batch', speed.together)):
    ratio = timings.ratio(reference, name)
    result |= {
      f'speedup_{kind}': ratio.median,
      f'speedup_{kind}_low': ratio.low,
      f'speedup_{kind}_high': ratio.high,
    }
  return result


def flop_limit(setting: Setting, reference: Setting, rows: np.ndarray) -> float:
  """How many times as fast a setting were if only FLOPs took time.

  Both at the shapes that are served: every row at the length bucket of its
  run. Rows that fill up a batch are not counted.

  Args:
    setting: the setting.
    reference: what it is compared with.
    rows: places in the split of the rows that were timed.
  """
  ours, theirs = (one.flops_served[rows] for one in (setting, reference))
  return float(theirs.sum() / ours.sum())


def example_rows(
  settings: Sequence[Setting], labels: np.ndarray, speed: Speed | None
) -> list[dict[str, Any]]:
  """A line for each row of the split and setting; not timed: no latency.

  `flops` are those of the row's own length, `flops_served` those of its length
  bucket. `kept_<layer>` are the tokens left after the pruning at that layer,
  None if the row left before it.
  """
  result = []
  for setting in settings:
    retention, depth = setting.retention, setting.depth
    flops, served = setting.flops, setting.flops_served
    chosen, reasons = setting.chosen, setting.reasons()
    latency: dict[int, float] = {}
    if speed is not None and setting.name in speed.latency:
      means = speed.latency[setting.name].mean(0)
      latency = dict(zip(speed.rows.tolist(), means.tolist(), strict=True))
    for row, label in enumerate(labels.tolist()):
      is_class = chosen.shape[1] > 1
      answer = int(chosen[row].argmax()) if is_class else float(chosen[row, 0])
      result.append(
        {
          'setting': setting.name,
          'index': row,
          'length': int(setting.model.length[row]),
          'depth': int(depth[row]),
          'exit_reason': reasons[row],
          'retention': float(retention[row]),
          'flops': float(flops[row]),
          'flops_served': float(served[row]),
          'answer': answer,
          'label': label,
          'correct': int(answer == label) if is_class else None,
          'latency': latency.get(row),
        }
        | _kept(setting, row)
      )
  return result


def _kept(setting: Setting, row: int) -> dict[str, int | None]:
  """The pruning at the layer of a head comes after the head."""
  model, depth = setting.model, int(setting.depth[row])
  counts = model.kept[row].tolist()
  return {
    f'kept_{layer}': count if layer < depth else None
    for layer, count in zip(model.module.prune_layers, counts, strict=True)
  }


def calibration_rows(
  logits: np.ndarray,
  labels: np.ndarray,
  temperatures: np.ndarray,
  layers: Sequence[int],
) -> list[dict[str, Any]]:
  """ECE and accuracy of each head, before and after its temperature.

  Args:
    logits: `[E, N, C]`, of rows that the temperatures were not fitted to.
    labels: `[N]`.
    temperatures: `[E]`.
    layers: of the heads, `[E]`.
  """
  before = calibration.errors(logits, labels)
  after = calibration.errors(logits, labels, temperatures=temperatures)
  return [
    {
      'layer': layer,
      'accuracy': float((head.argmax(-1) == labels).mean()),
      'temperature': float(temperatures[place]),
      'rows': len(labels),
      'ece': before[place],
      'ece_calibrated': after[place],
    }
    for place, (layer, head) in enumerate(zip(layers, logits, strict=True))
  ]


def write_csv(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
  """Writes rows whose columns may differ; what a row lacks is empty."""
  names = list(dict.fromkeys(name for row in rows for name in row))
  # What layers have comes last, in their order; models differ in them.
  names.sort(key=_layer)
  file = io.StringIO()
  writer = csv.DictWriter(file, names, lineterminator='\n')
  writer.writeheader()
  writer.writerows(rows)
  atomic_file.write_text(path, file.getvalue())


def _layer(name: str) -> int:
  kind, _, layer = name.partition('_')
  return int(layer) if kind in ('exit', 'kept') and layer.isdecimal() else 0
