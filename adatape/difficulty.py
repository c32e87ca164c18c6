"""Tape length and FLOPs against the difficulty of the inputs, and a picture."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
import scipy.stats
from jaxtyping import Int

from core.errors import ConfigError
from dataset_lib.source import Batched
from dataset_lib.synthetic import NAMES
from eval_lib import evaluator, glue, plots, report
from eval_lib.plots import Line, Panel
from eval_lib.report import Estimate

FILE = 'difficulty.csv'
QUARTERS = 4  # of the difficulties
EXAMPLES = 4  # rows that are drawn, from easy to hard
_COLOURS = {'1': plots.COLOURS[0]}
_PALE = '#ECECEC'  # letters
_ROW, _GAP = 1.5, 0.5  # distances of rows, and of steps, in symbols

# Arrays `[N, ...]` of the rows of a split, by name.
Rows = Mapping[str, np.ndarray]


@dataclasses.dataclass(kw_only=True)
class Evaluator(evaluator.Evaluator):
  """Measures tapes of data with a difficulty, such as parity with letters."""

  NEEDS_OUTPUTS: ClassVar[bool] = True
  METRICS = 'spearman', 'easy_share', 'flops_share'
  split: evaluator.Split = 'test'

  def __post_init__(self):
    super().__post_init__()
    source = self.splits['split'].source
    if not isinstance(source, Batched) or 'difficulty' not in source.record(0):
      expected = 'data with a difficulty, such as parity with letters=26'
      raise ConfigError('dataset', self.data['name'], expected)
    self._source = source

  def run(self, variables: Any) -> dict[str, float]:
    """Prints a table by quarter; writes difficulty.csv, .png and .pdf.

    Returns 'spearman', the rank correlation of difficulty and tape length, 0 if
    all tapes are equally long; 'easy_share', the mean length for the easiest
    quarter of the difficulties over that for the hardest; 'flops_share', the
    FLOPs as a share of T tape tokens' FLOPs.
    """
    rows = self.collect('split', variables, self.context.outputs)
    rows |= self._source.records(rows['index'])
    levels = np.unique(rows['difficulty'])
    quarters = np.array_split(levels, min(QUARTERS, len(levels)))
    parts = [summary(rows, quarter) for quarter in quarters]
    if jax.process_index() == 0:
      _print(parts, rows)
    if path := self.file(FILE):
      by_level = [summary(rows, levels[i : i + 1]) for i in range(len(levels))]
      report.write_csv(path, by_level)
      with plots.if_installed():
        draw(path, by_level, rows)
        print(f'picture: {path.with_suffix(".png")}')
    difficulty, lengths = rows['difficulty'], rows['tape_length']
    return {
      'spearman': glue.correlation(difficulty, lengths, scipy.stats.spearmanr),
      'easy_share': parts[0]['length_mean'] / parts[-1]['length_mean'],
      'flops_share': float((rows['flops'] / rows['full_flops']).mean()),
    }


def summary(rows: Rows, levels: Int[np.ndarray, ' Q']) -> dict[str, Any]:
  """Returns statistics of the rows of some ascending difficulties.

  Mean, std and quartiles of 'length', in tape tokens, and 'flops'; 'full_flops'
  is the mean of T tokens.
  """
  chosen = np.isin(rows['difficulty'], levels)
  name = ' to '.join(str(level) for level in dict.fromkeys(levels[[0, -1]]))
  right = rows['logits'][chosen, -1].argmax(-1) == rows['label'][chosen]
  result = {'difficulty': name, 'rows': int(chosen.sum())}
  result['accuracy'] = float(right.mean())
  for key, values in (('length', 'tape_length'), ('flops', 'flops')):
    numbers = rows[values][chosen].astype(np.float64)
    result[f'{key}_mean'] = float(numbers.mean())
    result[f'{key}_std'] = float(numbers.std())
    result[key] = Estimate.of(numbers)
  return result | {'full_flops': float(rows['full_flops'][chosen].mean())}


def _print(parts: list[dict[str, Any]], rows: Rows) -> None:
  slots, full = rows['tape_indices'].shape[1], parts[0]['full_flops']
  table = [
    {
      'difficulty': part['difficulty'],
      'rows': part['rows'],
      'tape tokens': f'{part["length_mean"]:.2f} ± {part["length_std"]:.2f}',
      'quartiles': f'{part["length"].low:g} to {part["length"].high:g}',
      'kFLOPs': f'{part["flops_mean"] / 1e3:.1f}',
      'of fixed %': f'{100 * part["flops_mean"] / full:.0f}',
      'accuracy %': f'{100 * part["accuracy"]:.2f}',
    }
    for part in parts
  ]
  table.append({
    'difficulty': 'fixed length', 'rows': len(rows['label']),
    'tape tokens': slots, 'kFLOPs': f'{full / 1e3:.1f}', 'of fixed %': 100,
  })  # fmt: skip
  report.print_table('tape by difficulty', table)


def draw(
  path: plots.Path, table: Sequence[Mapping[str, Any]], rows: Rows
) -> None:
  """Draws tape length and FLOPs over difficulty, and tapes of some rows.

  `table` has the `summary` of each difficulty; see `plots.figure`.
  """
  slots, full = float(rows['tape_indices'].shape[1]), table[0]['full_flops']
  x = np.array([int(row['difficulty']) for row in table])
  panels, dashed = [], {'linestyle': '--', 'marker': ''}
  for key, title, unit, scale, fixed in (
    ('length', 'Tape length', 'tape tokens', 1.0, slots),
    ('flops', 'Cost', 'kFLOPs per input', 1e-3, full),
  ):
    parts = [(row[key].low, row[f'{key}_mean'], row[key].high) for row in table]
    low, mean, high = scale * np.array(parts).T
    flat = np.full(len(x), scale * fixed)
    lines = [
      Line('adaptive: mean, quartiles', x, mean, 0, (low, high)),
      Line('fixed length', x, flat, 1, style=dashed),
    ]
    label = 'difficulty k: symbols that are 1'
    panels.append(Panel(title, unit, label, lines, y_limits=(0, None), ticks=8))
  with plots.figure(path, table, (10.0, 6.6)) as drawn:
    curves, tapes = drawn.subfigures(2, 1, height_ratios=(1.25, 1))
    for axes, panel in zip(curves.subplots(1, 2), panels, strict=True):
      plots.draw_panel(axes, panel)
    _draw_tapes(tapes.subplots(), rows, examples(rows))


def examples(rows: Rows) -> Int[np.ndarray, ' E']:
  """Returns the first row of median tape length of some difficulties."""
  levels = np.unique(rows['difficulty'])
  places = np.linspace(0, len(levels) - 1, EXAMPLES).round().astype(int)
  selected = []
  for place in dict.fromkeys(places.tolist()):
    here = np.flatnonzero(rows['difficulty'] == levels[place])
    length = rows['tape_length'][here]
    median = np.quantile(length, 0.5, method='nearest')
    selected.append(here[(length == median).argmax()])
  return np.array(selected)


def _draw_tapes(axes: Any, rows: Rows, chosen: Int[np.ndarray, ' E']) -> None:
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
