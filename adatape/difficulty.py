"""Tape length and FLOPs against the difficulty of the inputs.

For data that know how difficult a row is, as `synthetic.Parity` with letters:
an adaptive tape is shorter for easy inputs, a fixed one costs the same for all.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np
import scipy.stats
from jaxtyping import Int

from adatape import difficulty_picture
from dataset_lib.errors import ConfigError
from eval_lib import adaptive_plots, evaluator, glue, predictions, report
from eval_lib.report import Estimate

FILE = 'difficulty.csv'
QUARTERS = 4  # of the difficulties

# Arrays `[N, ...]` of the rows of a split, by name.
Rows = Mapping[str, np.ndarray]


@dataclasses.dataclass(kw_only=True)
class Evaluator(evaluator.Evaluator):
  """Measures tapes by difficulty, against the fixed length T.

  Needs `synthetic.Parity` with letters, and a `TapeClassification` with a bank.
  """

  NEEDS_OUTPUTS: ClassVar[bool] = True
  split: evaluator.Split = 'test'

  def __post_init__(self):
    self._data = self.open(self.split)
    if 'difficulty' not in self._data.source.record(0):
      expected = 'data with a difficulty, such as parity with letters=26'
      raise ConfigError('dataset', self.data['name'], expected)

  def run(self, variables: Any) -> dict[str, float]:
    """Prints a table by quarter; writes difficulty.csv, .png and .pdf.

    Returns:
      'spearman', the rank correlation of difficulty and tape length, 0 if all
      tapes are equally long; 'easy_share', the mean length for the easiest
      quarter of the difficulties over that for the hardest; 'flops_share', the
      mean FLOPs over those of T tape tokens.
    """
    source, context = self._data.source, self.context
    rows = predictions.collect(
      self._data, variables, context.outputs, context.put
    )
    rows |= source.records(rows['index'])
    levels = np.unique(rows['difficulty'])
    quarters = np.array_split(levels, min(QUARTERS, len(levels)))
    parts = [summary(rows, quarter) for quarter in quarters]
    if jax.process_index() == 0:
      _print(parts, rows)
    if path := self.file(FILE):
      by_level = [summary(rows, levels[i : i + 1]) for i in range(len(levels))]
      report.write_csv(path, by_level)
      with adaptive_plots.if_installed():
        difficulty_picture.draw(path, by_level, rows)
    pair = rows['difficulty'], rows['tape_length']
    return {
      'spearman': glue.correlation(*pair, scipy.stats.spearmanr),
      'easy_share': parts[0]['length_mean'] / parts[-1]['length_mean'],
      'flops_share': float((rows['flops'] / rows['full_flops']).mean()),
    }


def summary(rows: Rows, levels: Int[np.ndarray, ' Q']) -> dict[str, Any]:
  """Returns statistics of the rows of some ascending difficulties.

  Keys: 'difficulty', 'rows', 'accuracy'; 'length_mean', 'length_std' and
  'length' (median, quartiles) in tape tokens; the same of 'flops', and the mean
  'full_flops' of T tokens.
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
