"""The picture of `adatape.difficulty`: cost over difficulty, and some tapes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from dataset_lib.synthetic import NAMES
from eval_lib import plots
from eval_lib.plots import Line, Panel

EXAMPLES = 4  # rows that are shown, from easy to hard
_COLOURS = {'1': plots.COLOURS[0]}
_PALE = '#ECECEC'  # letters
_ROW, _GAP = 1.5, 0.5  # distances of rows, and of steps, in symbols


def draw(
  path: plots.Path,
  table: Sequence[Mapping[str, Any]],
  rows: Mapping[str, np.ndarray],
) -> None:
  """Draws tape length and FLOPs over difficulty, and tapes of some rows.

  `table` has the `difficulty.summary` of each difficulty, `rows` the arrays of
  all rows. See `plots.figure`.
  """
  slots, full = float(rows['tape_indices'].shape[1]), table[0]['full_flops']
  panels = [
    _panel(table, 'length', 'Tape length', 'tape tokens', 1.0, slots),
    _panel(table, 'flops', 'Cost', 'kFLOPs per input', 1e-3, full),
  ]
  with plots.figure(path, table, (10.0, 6.6)) as drawn:
    curves, tapes = drawn.subfigures(2, 1, height_ratios=(1.25, 1))
    for axes, panel in zip(curves.subplots(1, 2), panels, strict=True):
      plots.draw_panel(axes, panel)
    _draw_tapes(tapes.subplots(), rows, examples(rows))


def _panel(
  table: Sequence[Mapping[str, Any]],
  key: str,
  title: str,
  unit: str,
  scale: float,
  fixed: float,
) -> Panel:
  x = np.array([int(row['difficulty']) for row in table])
  values = [(row[key].low, row[f'{key}_mean'], row[key].high) for row in table]
  low, mean, high = scale * np.array(values).T
  lines = [
    Line('adaptive: mean, quartiles', x, mean, 0, (low, high)),
    Line('fixed length', x, np.full(len(x), scale * fixed), 1,
         style={'linestyle': '--', 'marker': ''}),
  ]  # fmt: skip
  x_label = 'difficulty k: symbols that are 1'
  return Panel(title, unit, x_label, lines, y_limits=(0, None), ticks=8)


def examples(rows: Mapping[str, np.ndarray]) -> Int[np.ndarray, ' E']:
  """Returns a typical row for each of some difficulties, spread evenly.

  It is the first one with the median tape length, ascending by difficulty.
  """
  levels = np.unique(rows['difficulty'])
  places = np.linspace(0, len(levels) - 1, EXAMPLES).round().astype(int)
  found = []
  for place in dict.fromkeys(places.tolist()):
    here = np.flatnonzero(rows['difficulty'] == levels[place])
    length = rows['tape_length'][here]
    median = np.quantile(length, 0.5, method='nearest')
    found.append(here[(length == median).argmax()])
  return np.array(found)


def _draw_tapes(
  axes: Any, rows: Mapping[str, np.ndarray], chosen: Int[np.ndarray, ' E']
) -> None:
  """Draws the symbols of each input, and those that each step reads."""
  picks, size = rows['tape_indices'], rows['tokens'].shape[1]
  slots, picked = picks.shape[1:]
  start, step = size + 1.5, picked + _GAP
  end = start + slots * step
  # (x, row, symbol); '' is a slot that is not read.
  cells: list[tuple[float, int, str]] = []
  texts: list[tuple[float, float, str]] = [
    (size / 2, -1.0, 'input'),
    ((start + end) / 2, -1.0, 'symbols read: a box is a step, a tape token'),
    (end + 1, -1.0, 'tokens'),
  ]
  for place, row in enumerate(chosen):
    names = [NAMES[token] for token in rows['tokens'][row]]
    length = int(rows['tape_length'][row])
    texts.append((-2, place, f'k = {rows["difficulty"][row]}'))
    texts.append((end + 1, place, f'{length}'))
    cells += [(x, place, name) for x, name in enumerate(names)]
    for number, pick in np.ndindex(slots, picked):
      name = names[picks[row, number, pick]] if number < length else ''
      cells.append((start + number * step + pick, place, name))
  left, places, shown = zip(*cells, strict=True)
  faces = [_COLOURS.get(name, _PALE if name else 'none') for name in shown]
  bottom = _ROW * np.array(places) - 0.5
  axes.bar(left, 1.0, 0.94, bottom, color=faces, edgecolor=_PALE, linewidth=1)
  centred = dict(ha='center', va='center')
  for x, place, name in cells:
    colour = 'white' if name in _COLOURS else plots.GREY
    axes.text(x, _ROW * place, name, color=colour, fontsize=8, **centred)
  for x, line, text in texts:
    axes.text(x, _ROW * line, text, color=plots.GREY, **centred)
  axes.set_aspect('equal')
  axes.invert_yaxis()
  axes.axis('off')
