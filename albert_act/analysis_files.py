"""The analysis as files: tables in CSV, curves and sentences as pictures.

Beside the iterations of tokens stands, in a row of its own, the depth that is
executed for their rows.
"""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from albert_act.analysis import Findings, Moments
from albert_act.treebank import LabelFindings
from dataset_lib.tokenizer import Tokenizer
from eval_lib import csv_file, iteration_plots
from eval_lib.iteration_plots import Depths

DEPTH = 'executed depth of a row'
LABELS_MEAN = 'mean of the labels'
LABELS_STD = 'standard deviation of the labels'
LEFT_OUT = 'words left out'
RARE = 'words of rarer labels'
# The curves over the iterations, by what their axes are called.
ALL = 'cosine, all tokens'
RUNNING = 'cosine, still running'
SHARE = 'share still running'

Table = list[dict[str, Any]]


def iteration_rows(found: Findings) -> Table:
  """Iterations by kind of token, as far as there are any, and the depth."""
  kinds = {kind: x for kind, x in found.iterations.items() if x.count}
  return [_row(kind, x) for kind, x in (kinds | {DEPTH: found.depth}).items()]


def _row(name: str, values: Moments) -> dict[str, Any]:
  return {
    'tokens': name,
    'count': int(values.count),
    'mean': round(float(values.mean), 4),
    'std': round(float(values.std), 4),
  }


def curves(found: Findings) -> dict[str, dict[str, np.ndarray]]:
  """`ALL`, `RUNNING` and `SHARE` by iteration, `[N]`, by kind of token.

  NaN is the mean of no tokens.
  """
  kinds = {kind: x for kind, x in found.similarity.items() if x.count}
  return {
    ALL: {kind: np.asarray(x.mean) for kind, x in kinds.items()},
    RUNNING: {
      kind: np.array([x.mean for x in found.running[kind]]) for kind in kinds
    },
    SHARE: {
      kind: np.array([x.count for x in found.running[kind]]) / all_of.count
      for kind, all_of in kinds.items()
    },
  }


def similarity_rows(found: Findings, only: str = '') -> Table:
  """A row for each iteration, with three columns for each kind of token.

  Those of `curves`: its name, and with 'running' and 'share' behind it; what
  is the mean of nothing is empty.

  Args:
    found: by kind of token.
    only: one kind; '' for all there are.
  """
  by_name = curves(found)
  columns = {
    f'{kind}{suffix}': curve
    for kind in by_name[ALL]
    if only in ('', kind)
    for suffix, curve in (
      ('', by_name[ALL][kind]),
      (' running', by_name[RUNNING][kind]),
      (' share', by_name[SHARE][kind]),
    )
  }
  return [
    {'iteration': n + 1}
    | {name: _rounded(curve[n], 6) for name, curve in columns.items()}
    for n in range(found.max_iterations)
  ]


def _rounded(value: Any, digits: int = 4) -> Any:
  return '' if np.isnan(value) else round(float(value), digits)


def label_rows(found: LabelFindings, most: int | None = None) -> Table:
  """Iterations by dependency label, and below them what they are marked by.

  A label that is above the sum of mean and standard deviation has a star. Words
  that were not counted and the executed depth come last.

  Args:
    found: by dependency label.
    most: labels, the most frequent; None for all.
  """
  labels = len(found.labels)
  return [
    {'label': name, 'count': int(count), 'mean': _rounded(mean), 'high': high}
    for name, count, mean, high in (
      *((x.name, x.count, x.mean, '*' if x.is_high else '')
        for x in found.labels[:most]),
      (LABELS_MEAN, labels, found.mean, ''),
      (LABELS_STD, labels, found.std, ''),
      (RARE, found.rare, np.nan, ''),
      (LEFT_OUT, found.left_out, np.nan, ''),
      (DEPTH, found.depth.count, found.depth.mean, ''),
    )
  ]  # fmt: skip


def sentences(
  batches: Iterable[tuple[Mapping[str, Any], Int[np.ndarray, 'B L']]],
  tokenizer: Tokenizer,
) -> list[Depths]:
  """The real rows of batches with the iterations of their tokens.

  Args:
    batches: of `analysis.token_iterations`.
    tokenizer: of the model.
  """
  found = []
  for batch, steps in batches:
    for row in np.flatnonzero(batch['mask']):
      spent = steps[row, : batch['length'][row]]
      names = tokenizer.names(batch['tokens'][row, : len(spent)].tolist())
      title = f'mean {spent.mean():.1f}, executed {spent.max()}'
      found.append(Depths(names, spent.tolist(), title))
  return found


def write(
  out: pathlib.Path,
  found: Findings,
  labels: LabelFindings | None = None,
  shown: Sequence[Depths] = (),
) -> str:
  """Writes all files into a directory.

  Args:
    out: the directory, which is made.
    found: by kind of token.
    labels: by dependency label, if there is a treebank.
    shown: sentences, if there are to be any.

  Returns:
    Why there are no pictures, the tables and the page being written all the
    same; '' if there are.
  """
  out.mkdir(parents=True, exist_ok=True)
  csv_file.write(out / 'iterations.csv', iteration_rows(found))
  csv_file.write(out / 'similarity.csv', similarity_rows(found))
  if labels is not None:
    csv_file.write(out / 'labels.csv', label_rows(labels))
  limit = found.max_iterations
  if shown:
    iteration_plots.write_depths(out / 'sentences', shown, limit)
  try:
    iteration_plots.plot_curves(
      out / 'similarity', curves(found), 'Similarity of consecutive states'
    )
    if shown:
      iteration_plots.plot_depths(out / 'sentences', shown, limit)
  except ImportError as error:
    return str(error)
  return ''
