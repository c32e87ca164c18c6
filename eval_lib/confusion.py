"""Confusion of classes: which are taken for which, how well each is found."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from core.errors import ConfigError
from eval_lib import evaluator, heads, plots, report
from eval_lib.predictions import Labels

FILE = 'classes.csv'
MOST = 30  # classes that are drawn or printed


def order(names: Sequence[str]) -> list[int]:
  """Returns class ids sorted by name, numbers by value."""
  keys = [(name.isdecimal() and len(name), name) for name in names]
  return sorted(range(len(names)), key=keys.__getitem__)


def table(
  labels: Labels, predicted: Labels, names: Sequence[str]
) -> list[dict[str, Any]]:
  """Returns a row for each class, in `order`; labels are class ids `[N]`.

  'class', 'precision', 'recall', 'f1' in [0, 1], where 0 / 0 is 0, and
  'support', the number of rows with this label.
  """
  from sklearn import metrics  # slow to import

  columns = metrics.precision_recall_fscore_support(
    labels, predicted, labels=order(names), zero_division=0.0
  )
  ordered = [names[n] for n in order(names)], *map(np.ndarray.tolist, columns)
  keys = 'class', 'precision', 'recall', 'f1', 'support'
  rows = zip(*ordered, strict=True)
  return [dict(zip(keys, row, strict=True)) for row in rows]


def plot(
  axes: Any,
  labels: Labels,
  predicted: Labels,
  names: Sequence[str],
  source: str,
) -> None:
  """Draws numbers of rows, coloured by their share of the rows of a label.

  The title names their `source`. Of more than `MOST` classes, those with most
  errors as label or prediction.
  """
  from sklearn import metrics

  every = order(names)
  rows = metrics.confusion_matrix(labels, predicted, labels=every)
  errors = rows.sum(0) + rows.sum(1) - 2 * rows.diagonal()
  chosen = np.sort(np.argsort(-errors, kind='stable')[:MOST])
  shares = 100 * rows / np.maximum(rows.sum(1, keepdims=True), 1)
  rows, shares = (x[np.ix_(chosen, chosen)] for x in (rows, shares))
  edges, places = np.arange(len(chosen) + 1) - 0.5, range(len(chosen))
  look: Any = dict(cmap='Blues', vmin=0, vmax=100)
  mesh = axes.pcolormesh(edges, edges, shares, **look)
  beside = axes.inset_axes((1.03, 0, 0.05, 1))  # as high as the square
  axes.figure.colorbar(mesh, beside, label='share of the label (%)')
  look = dict(ha='center', va='center', fontsize=7)
  for y, x in np.argwhere(rows):
    ink = 'white' if shares[y, x] > 50 else 'black'
    axes.text(x, y, rows[y, x], color=ink, **look)
  shown = [plots.shown(names[every[n]])[:24] for n in chosen]
  axes.set_xticks(places, shown, rotation=90)
  axes.set_yticks(places, shown)
  title = f'{len(labels)} rows of {source}'
  if len(chosen) < len(names):
    title += f'\n{len(chosen)} most confused of {len(names)} classes'
  axes.set(xlabel='predicted', ylabel='label', aspect='equal')
  axes.set_title(title, wrap=True)
  axes.invert_yaxis()
  axes.grid(visible=False)


@dataclasses.dataclass(kw_only=True)
class Evaluator(evaluator.Evaluator):
  """Prints `table`; writes it as classes.csv, and confusion.png and .pdf.

  Of other data these are named by them: classes.new.csv, confusion.new.png.
  """

  NEEDS_OUTPUTS: ClassVar[bool] = True
  METRICS = 'macro_precision', 'macro_recall', 'macro_f1'
  split: evaluator.Split = 'test'

  def __post_init__(self):
    super().__post_init__()
    info = self.splits['split'].info
    if info.num_classes < 2 or info.label_kind not in ('', 'class'):
      kind = info.label_kind or 'number'
      raise ConfigError('dataset.label_kind', kind, "'class', one for each row")
    self._names = [*map(str, info.class_names or range(info.num_classes))]

  def run(self, variables: Any) -> dict[str, float]:
    """Returns means over the classes that have rows, of the last head."""
    rows = self.collect('split', variables, self.context.outputs)
    labels, answers = rows['label'], rows['logits'][:, -1].argmax(-1)
    classes = table(labels, answers, self._names)
    if jax.process_index() == 0:
      worst = sorted(classes, key=lambda row: row['f1'])[:MOST]
      title = f'{len(worst)} of {len(classes)} classes, lowest F1 first'
      report.print_table(title, worst, columns=[*worst[0]])
    name = heads.named(FILE, pathlib.Path(self.other).stem)
    if path := self.file(name):
      report.write_csv(path, classes)
      side = 2.4 + 0.3 * np.clip(len(classes), 6, MOST)
      picture = path.with_name(name.replace('classes', 'confusion', 1))
      size = side + 0.8, side
      with plots.if_installed(), plots.figure(picture, classes, size) as drawn:
        source = self.split + ', last head' * (rows['logits'].shape[1] > 1)
        plot(drawn.subplots(), labels, answers, self._names, source)
        drawn.draw_without_rendering()  # the layout has no wrapped lines yet
    there = [row for row in classes if row['support']]
    return {
      name: float(np.mean([row[name.removeprefix('macro_')] for row in there]))
      for name in self.METRICS
    }
