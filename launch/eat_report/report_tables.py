"""Tables of an EAT report on the terminal: GFLOPs, milliseconds, percent."""

from collections.abc import Mapping, Sequence
from typing import Any

from eval_lib.timing import Estimate

WIDTH = 130  # characters of the widest table


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

  def _print(
    self, title: str, headings: Sequence[str], lines: Any, note: str = ''
  ) -> None:
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
    if note:
      self.say(f'{note}\n')

  def settings(
    self,
    rows: Sequence[Mapping[str, Any]],
    metric: str,
    title: str,
    fitted: int = 0,
  ) -> None:
    """Quality and cost of settings.

    Args:
      rows: of `report_rows.setting_row`.
      metric: name of the quality.
      title: of the table.
      fitted: rows that the temperatures were fitted to.
    """
    used = f'; {fitted} of the rows also served to fit the temperatures'
    self._print(
      title,
      ('setting', f'{metric} %', 'same as its own\nlast head %', 'layers',
       'kept %', 'GFLOPs', 'of dense %', 'GFLOPs\nserved', 'early %'),
      (
        (row['setting'], _percent(row['quality']),
         '' if row['agreement'] is None else _percent(row['agreement']),
         f'{row["depth"]:.2f}', _percent(row['retention']),
         f'{row["flops"] / 1e9:.3g}', _percent(row['flops_share']),
         f'{row["flops_served"] / 1e9:.3g}', _percent(row['early']))
        for row in rows
      ),
      'GFLOPs are by formula, for the length of each row; served: for its '
      f'length bucket, as the engine runs it{used if fitted else ""}',
    )  # fmt: skip

  def speed(
    self,
    rows: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Mapping[str, Any]],
    metric: str,
    reference: str,
  ) -> None:
    """Quality and speed of the settings that were timed.

    Args:
      rows: of `report_rows.speed_row` with the `flop_limit`, None for
        libraries that are not given length buckets.
      settings: of `report_rows.setting_row`, by name.
      metric: name of the quality.
      reference: name of the setting that speed is compared with.
    """
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
         '' if row['flop_limit'] is None else f'{row["flop_limit"]:.2f}')
        for row in rows
      ),
      f'FLOP limit: FLOPs of {reference} over those of the setting, on the '
      'same rows, both as served: padded to the length bucket',
    )  # fmt: skip

  def calibration(
    self, rows: Sequence[Mapping[str, Any]], total: int, source: str
  ) -> None:
    """ECE of the heads.

    Args:
      rows: of `report_rows.calibration_rows`.
      total: rows of the split, those that do not count included.
      source: where the temperatures come from.
    """
    judged = rows[0]['rows']
    others = ': the temperatures are fitted to the others'
    self._print(
      f'calibration on {judged} of {total} rows'
      f'{others if judged < total else ""}',
      ('head', 'accuracy %', 'T', 'ECE %', 'ECE % after'),
      (
        (f'layer {row["layer"]}', _percent(row['accuracy']),
         f'{row["temperature"]:.3f}', _percent(row['ece']),
         _percent(row['ece_calibrated']))
        for row in rows
      ),
      f'temperatures: {source}',
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
