"""Tables of an EAT report: on the terminal and as CSV.

The CSV files have FLOPs, seconds and shares; the terminal shows GFLOPs,
milliseconds and percent.
"""

import csv
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dataset_lib import atomic_file
from eval_lib import calibration
from eval_lib.timing import Estimate
from launch.eat_report.speed import Speed
from launch.eat_report.sweeps import Setting

WIDTH = 130  # characters of the widest table


def setting_row(setting: Setting) -> dict[str, Any]:
  """What a setting gives, as plain numbers."""
  point, model = setting.point, setting.model
  retention, flops = setting.retention, setting.flops
  return {
    'setting': setting.name,
    'run': model.run.directory,
    'variant': model.variant or 'as trained',
    'rule': setting.rule.name,
    'value': point.value,
    'quality': point.quality,
    'agreement': point.agreement,
    'depth': point.depth,
    'retention': float(retention.mean()),
    'flops': float(flops.mean()),
    'flops_share': point.flops,
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


def example_rows(
  settings: Sequence[Setting], labels: np.ndarray, speed: Speed | None
) -> list[dict[str, Any]]:
  """A line for each row of the split and setting; not timed: no latency."""
  result = []
  for setting in settings:
    retention, flops, depth = setting.retention, setting.flops, setting.depth
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
          'answer': answer,
          'label': label,
          'correct': int(answer == label) if is_class else None,
          'latency': latency.get(row),
        }
      )
  return result


def calibration_rows(
  logits: np.ndarray,
  labels: np.ndarray,
  temperatures: np.ndarray,
  layers: Sequence[int],
) -> list[dict[str, Any]]:
  """ECE and accuracy of each head, before and after its temperature."""
  before = calibration.errors(logits, labels)
  after = calibration.errors(logits, labels, temperatures=temperatures)
  return [
    {
      'layer': layer,
      'accuracy': float((head.argmax(-1) == labels).mean()),
      'temperature': float(temperatures[place]),
      'ece': before[place],
      'ece_calibrated': after[place],
    }
    for place, (layer, head) in enumerate(zip(layers, logits, strict=True))
  ]


def write_csv(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
  """Writes rows whose columns may differ; what a row lacks is empty."""
  names = list(dict.fromkeys(name for row in rows for name in row))
  # The shares of the exits last, by layer; models differ in their layers.
  names.sort(key=_exit_layer)
  file = io.StringIO()
  writer = csv.DictWriter(file, names, lineterminator='\n')
  writer.writeheader()
  writer.writerows(rows)
  atomic_file.write_text(path, file.getvalue())


def _exit_layer(name: str) -> int:
  kind, _, layer = name.partition('_')
  return int(layer) if kind == 'exit' and layer.isdecimal() else 0


class Tables:
  """Prints tables on the terminal."""

  def __init__(self):
    import rich.console

    self._console = rich.console.Console(highlight=False)
    # A terminal that is narrower wraps; a column that is cut says nothing.
    self._console.width = max(self._console.width, WIDTH)

  def say(self, text: str) -> None:
    """Prints a line as it is."""
    self._console.print(text, markup=False, soft_wrap=True)

  def _print(self, title: str, headings: Sequence[str], lines) -> None:
    import rich.box
    import rich.table
    import rich.text

    table = rich.table.Table(
      title=rich.text.Text(title), box=rich.box.SIMPLE, collapse_padding=True,
      title_justify='left',
    )  # fmt: skip
    for place, heading in enumerate(headings):
      side: Any = 'right' if place else 'left'
      table.add_column(heading, no_wrap=True, justify=side)
    for line in lines:
      # What is in brackets is a range and no markup.
      table.add_row(*(rich.text.Text(str(cell)) for cell in line))
    self._console.print(table)

  def settings(
    self, rows: Sequence[Mapping[str, Any]], metric: str, title: str
  ) -> None:
    """Quality and cost of settings."""
    self._print(
      title,
      ('setting', f'{metric} %', 'same %', 'layers', 'kept %', 'GFLOPs',
       'of dense %', 'early %'),
      (
        (row['setting'], _percent(row['quality']), _percent(row['agreement']),
         f'{row["depth"]:.2f}', _percent(row['retention']),
         f'{row["flops"] / 1e9:.3g}', _percent(row['flops_share']),
         _percent(row['early']))
        for row in rows
      ),
    )  # fmt: skip

  def speed(
    self,
    rows: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Mapping[str, Any]],
    metric: str,
    reference: str,
  ) -> None:
    """Quality and speed of the settings that were timed."""
    first = rows[0]
    self._print(
      f'measured: {first["rows"]} rows, {first["repeats"]} repeats; latency at '
      f'batch 1, rows/s at batch {first["batch_size"]}, x = times as fast as '
      f'{reference}, median [quartiles]',
      ('setting', f'{metric} %', 'mean ms', 'p50', 'p95', 'x, batch 1',
       'rows/s', f'x, batch {first["batch_size"]}', 'FLOP limit'),
      (
        (row['setting'], _percent(settings[row['setting']]['quality']),
         *(f'{1e3 * row[f"latency_{kind}"]:.3g}'
           for kind in ('mean', 'p50', 'p95')),
         _ratio(row, 'speedup_batch_1'), f'{row["throughput"]:.4g}',
         _ratio(row, 'speedup_batch'),
         f'{_limit(settings, reference, row["setting"]):.2f}')
        for row in rows
      ),
    )  # fmt: skip

  def calibration(self, rows: Sequence[Mapping[str, Any]], source: str) -> None:
    """ECE of the heads."""
    self._print(
      f'calibration (temperatures: {source})',
      ('head', 'accuracy %', 'T', 'ECE %', 'ECE % after'),
      (
        (f'layer {row["layer"]}', _percent(row['accuracy']),
         f'{row["temperature"]:.3f}', _percent(row['ece']),
         _percent(row['ece_calibrated']))
        for row in rows
      ),
    )  # fmt: skip

  def guarantee(self, rows: Sequence[Mapping[str, Any]]) -> None:
    """How often the guarantee failed, against delta."""
    first = rows[0]
    self._print(
      f'guarantee: risk <= {first["epsilon"]:g} with probability '
      f'{1 - first["delta"]:g}; {first["draws"]} resamplings of '
      f'{first["rows"]} rows',
      ('risk', 'exceeded %', 'allowed %', 'mean %', 'worst %', 'tau',
       'early %'),
      (
        (row['loss'], _percent(row['exceeded']), _percent(row['delta']),
         f'{100 * row["mean"]:.2f}', f'{100 * row["worst"]:.2f}',
         'never' if row['threshold'] is None else f'{row["threshold"]:.4f}',
         _percent(row['early']))
        for row in rows
      ),
    )  # fmt: skip


def _percent(share: float) -> str:
  return f'{100 * share:.1f}'


def _ratio(row: Mapping[str, Any], name: str) -> str:
  low, high = row[f'{name}_low'], row[f'{name}_high']
  return Estimate(row[name], low, high).text()


def _limit(settings: Mapping[str, Any], reference: str, name: str) -> float:
  return settings[reference]['flops'] / settings[name]['flops']
