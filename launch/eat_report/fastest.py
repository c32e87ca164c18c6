"""The fastest settings that lose little quality against the dense run."""

from collections.abc import Mapping, Sequence
from typing import Any

from launch.eat_report.sweeps import Setting

POINTS = (0.5, 1.0, 2.0)  # percentage points of quality that may be lost
_ROUNDING = 1e-9  # of qualities, so that exactly a point is within a point


def fastest(
  settings: Sequence[Setting],
  dense: Setting,
  timings: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
  """The fastest setting for each number of points that may be lost.

  It is chosen by the rows that its quality is measured on, so among many
  settings that lose about as much the luckiest one wins.

  Args:
    settings: of the EAT run.
    dense: the dense run's setting.
    timings: of `report_rows.speed_row`, by the name of the setting. The timed
      settings are compared by their speed-up at batch 1; {} compares all by
      their FLOPs as served.

  Returns:
    For each of `POINTS`: `points`; `setting`, None if none loses as little;
    and of it `quality`, `flops_served_share` of the dense run's and, if timed,
    `speedup_batch_1` and `speedup_batch`.
  """
  known = [one for one in settings if not timings or one.name in timings]

  def slowness(setting: Setting) -> float:
    if timings:
      return -timings[setting.name]['speedup_batch_1']
    return _served_share(setting, dense)

  result = []
  for points in POINTS:
    least = dense.point.quality - points / 100 - _ROUNDING
    good = [one for one in known if one.point.quality >= least]
    row: dict[str, Any] = {'points': points, 'setting': None}
    if good:
      row |= _numbers(min(good, key=slowness), dense, timings)
    result.append(row)
  return result


def _served_share(setting: Setting, dense: Setting) -> float:
  return float(setting.flops_served.sum() / dense.flops_served.sum())


def _numbers(
  setting: Setting, dense: Setting, timings: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
  timed = timings.get(setting.name, {})
  speedups = ('speedup_batch_1', 'speedup_batch')
  return {
    'setting': setting.name,
    'quality': setting.point.quality,
    'flops_served_share': _served_share(setting, dense),
  } | {name: timed[name] for name in speedups if timed}


def line(rows: Sequence[Mapping[str, Any]], dense: Setting) -> str:
  """What `fastest` found, in one line."""
  timed = any('speedup_batch' in row for row in rows)
  found = '; '.join(f'{row["points"]:g}: {_text(row)}' for row in rows)
  quality = f'{100 * dense.point.quality:.1f}'
  return (
    f'{"fastest" if timed else "cheapest"} within so many points of '
    f'{dense.name} ({quality}), chosen on these rows: {found}'
  )


def _text(row: Mapping[str, Any]) -> str:
  if row['setting'] is None:
    return 'none'
  if 'speedup_batch' in row:
    gain = (
      f'{row["speedup_batch_1"]:.2f}x at batch 1, '
      f'{row["speedup_batch"]:.2f}x in full batches'
    )
  else:
    gain = f'{100 * row["flops_served_share"]:.0f} % of its FLOPs as served'
  return f'{row["setting"]} ({100 * row["quality"]:.1f}, {gain})'
