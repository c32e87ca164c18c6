"""The analysis as tables, curves and coloured sentences."""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from albert_act.analysis import Analysis
from dataset_lib.tokenizer import Tokenizer
from eval_lib import adaptive_plots, text_pages
from eval_lib.report import write_csv

DEPTH = 'executed depth of a row'
PAGE = 'Iterations of each token'
# The curves over the iterations, by the labels of their axes, and the suffixes
# of their columns.
CURVES = {
  'cosine, all tokens': '',
  'cosine, still running': ' running',
  'share still running': ' share',
}

Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Table:
  """A table: the name of its file, a title, rows, a note, and printed rows."""

  name: str
  title: str
  rows: Rows
  note: str
  shown: Rows


def tables(found: Analysis) -> list[Table]:
  """Returns the iterations by kind of token and the similarity of states."""
  limit = found.max_iterations
  kinds = {kind: x for kind, x in found.iterations.items() if x.count}
  iterations = [
    {
      'tokens': name,
      'count': int(values.count),
      'mean': rounded(values.mean),
      'std': rounded(values.std),
    }
    for name, values in (kinds | {DEPTH: found.depth}).items()
  ]
  by_name = curves(found)
  similarity = [
    {'iteration': n + 1}
    | {
      f'{kind}{suffix}': rounded(by_name[name][kind][n], 6)
      for kind in kinds
      for name, suffix in CURVES.items()
    }
    for n in range(limit)
  ]
  columns = ['iteration', *(f'all{suffix}' for suffix in CURVES.values())]
  return [
    Table(
      'iterations', f'Iterations, at most {limit}', iterations,
      f'tokens take {found.iterations["all"].mean / limit:.0%} of the '
      'iterations, rows that wait for their last token '
      f'{found.depth.mean / limit:.0%}',
      iterations,
    ),
    Table(
      'similarity', 'Cosine of states before and after', similarity,
      'a halted token counts as 1 in all, and not in running, the mean over '
      'the share that still runs',
      [{name: row[name] for name in columns} for row in similarity],
    ),
  ]  # fmt: skip


def curves(found: Analysis) -> dict[str, dict[str, np.ndarray]]:
  """Returns the `CURVES` by iteration, `[N]`, by kind of token.

  NaN is the mean of no tokens.
  """
  similarity, running = found.similarity, found.running
  kinds = [kind for kind, x in found.iterations.items() if x.count]
  values = (
    {kind: similarity[kind].mean for kind in kinds},
    {kind: running[kind].mean for kind in kinds},
    {kind: running[kind].count / similarity[kind].count for kind in kinds},
  )
  return dict(zip(CURVES, values, strict=True))


def rounded(value: Any, digits: int = 4) -> float | None:
  """Returns a rounded number, or None for NaN."""
  return None if np.isnan(value) else round(float(value), digits)


def blocks(
  batches: Iterable[tuple[Mapping[str, Any], Int[np.ndarray, 'B L']]],
  tokenizer: Tokenizer,
  most: int,
) -> list[text_pages.Block]:
  """Returns the real rows of batches, coloured by their iterations.

  Args:
    batches: of `analysis.token_iterations`.
    tokenizer: of the model.
    most: iterations of the darkest colour.
  """
  result = []
  for batch, steps in batches:
    for row in np.flatnonzero(batch['mask']):
      spent = steps[row, : batch['length'][row]]
      names = tokenizer.names(batch['tokens'][row, : len(spent)].tolist())
      title = f'mean {spent.mean():.1f}, executed {spent.max()}'
      result.append(text_pages.depths_block(names, spent.tolist(), most, title))
  return [text_pages.scale(most), *result] if result else []


def write(
  out: pathlib.Path,
  found: Analysis,
  written: Sequence[Table],
  page: Sequence[text_pages.Block] = (),
) -> str:
  """Writes all files into a directory, which is made.

  Args:
    out: the directory.
    found: the analysis, for the curves.
    written: the tables.
    page: of `blocks`, () for no page.

  Returns:
    The reason why there are no pictures, or ''.
  """
  out.mkdir(parents=True, exist_ok=True)
  for table in written:
    write_csv(out / f'{table.name}.csv', table.rows)
  if page:
    text_pages.write_page(out / 'sentences', page, title=PAGE)
  try:
    adaptive_plots.plot_iterations(
      out / 'similarity', curves(found), 'Similarity of consecutive states'
    )
    if page:
      text_pages.plot_page(out / 'sentences', page, title=PAGE)
  except ImportError as error:
    return str(error)
  return ''
