"""The analysis as tables, curves and coloured sentences.

Dependency labels as in Simoulin and Crabbe (2021), Tables 3 to 5: a token has
the label of its word (footnote 7), and a label is marked whose mean is above
the mean of the labels by more than their standard deviation.
"""

import collections
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from albert_act import analysis
from albert_act.analysis import Analysis
from albert_act.encoder import Albert
from dataset_lib import conllu, source
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
SHOWN_LABELS = 20  # of the printed table; the file has all
_STEP = 32  # tokens; rows are padded to multiples, each of which is compiled

Rows = list[dict[str, Any]]


class Table(NamedTuple):
  """A table: the name of its file, a title, rows, a note, and printed rows."""

  name: str
  title: str
  rows: Rows
  note: str
  shown: Rows


def tables(found: Analysis) -> list[Table]:
  """Returns the iterations by kind of token and the similarity of states."""
  limit, by_name = found.max_iterations, curves(found)
  kinds = by_name['cosine, all tokens']
  moments = {kind: found.iterations[kind] for kind in kinds}
  iterations = [
    {
      'tokens': name,
      'count': int(values.count),
      'mean': _rounded(values.mean),
      'std': _rounded(values.std),
    }
    for name, values in (moments | {DEPTH: found.depth}).items()
  ]
  similarity = [
    {'iteration': n + 1}
    | {
      f'{kind}{suffix}': _rounded(by_name[name][kind][n], 6)
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
  """Returns the `CURVES` by iteration, `[N]`, by kind; NaN of no tokens."""
  similarity, running = found.similarity, found.running
  kinds = [kind for kind, x in found.iterations.items() if x.count]
  values = (
    {kind: similarity[kind].mean for kind in kinds},
    {kind: running[kind].mean for kind in kinds},
    {kind: running[kind].count / similarity[kind].count for kind in kinds},
  )
  return dict(zip(CURVES, values, strict=True))


def _rounded(value: Any, digits: int = 4) -> float | None:
  return None if np.isnan(value) else round(float(value), digits)


def label_table(
  model: Albert,
  variables: Any,
  tokenizer: Tokenizer,
  sentences: Sequence[Sequence[conllu.Word]],
  max_length: int,
  at_least: int = 1,
) -> Table:
  """Analyses the sentences of a treebank.

  Args:
    model: its masked form.
    variables: its variables.
    tokenizer: of the model.
    sentences: of `dataset_lib.conllu`; subtypes of labels are merged.
    max_length: longest row in tokens; words after it are left out.
    at_least: words that a label must have to be counted.

  Raises:
    ValueError: max_length is too small.
  """
  encoded, places = conllu.encode_words(
    tokenizer, [[word.form for word in one] for one in sentences], max_length
  )
  buckets = source.length_buckets(range(_STEP, max_length, _STEP), max_length)
  info = source.DatasetInfo(
    'tokens', (max_length,), 'int32', 1, (), len(sentences),
    length_buckets=buckets,
  )  # fmt: skip
  records = source.TokenSource(
    info, encoded, np.zeros(len(sentences)), tokenizer.pad_id, str
  )
  batches = analysis.batches(records, 0, len(sentences))
  depth, left_out = analysis.Moments(), 0
  words: list[tuple[str, Int[np.ndarray, ' T']]] = []
  for batch, steps in analysis.token_iterations(model, variables, batches):
    for row in np.flatnonzero(batch['mask']):
      number = batch['index'][row]
      own, spans = sentences[number], places[number]
      depth.add(steps[row].max(keepdims=True))
      left_out += len(own) - len(spans)
      words += [
        (word.universal_label, steps[row, start:stop])
        for word, (start, stop) in zip(own, spans, strict=False)
      ]
  labels, below = label_rows(words, at_least)
  below += [
    _label_row('words left out', left_out),
    _label_row(DEPTH, int(depth.count), depth.mean),
  ]
  return Table(
    'labels', f'Iterations by dependency label, {len(sentences)} sentences',
    labels + below,
    '* above the mean of the labels by more than their standard deviation; '
    'labels of few words (--label_words) and words after the longest row are '
    'left out',
    labels[:SHOWN_LABELS] + below,
  )  # fmt: skip


def label_rows(
  words: Iterable[tuple[str, Int[np.ndarray, ' _']]], at_least: int
) -> tuple[Rows, Rows]:
  """Averages iterations by dependency label.

  Args:
    words: (label, iterations of its tokens) of each word; one without tokens
      does not count.
    at_least: words that a label must have to be counted.

  Returns:
    (a row for each label, the most frequent first; rows about all of them).
  """
  found: dict[str, list[Int[np.ndarray, ' T']]] = collections.defaultdict(list)
  for name, steps in words:
    if len(steps):
      found[name].append(steps)
  means = {
    name: float(np.concatenate(parts).mean())
    for name, parts in found.items()
    if len(parts) >= at_least
  }
  over = analysis.Moments()
  over.add(np.array(list(means.values())))
  high = over.mean + over.std
  labels = [
    _label_row(name, len(found[name]), mean, '*' if mean > high else '')
    for name, mean in means.items()
  ]
  rare = sum(len(parts) for name, parts in found.items() if name not in means)
  return sorted(labels, key=lambda row: (-row['count'], row['label'])), [
    _label_row('mean of the labels', len(labels), over.mean),
    _label_row('standard deviation of the labels', len(labels), over.std),
    _label_row('words of rarer labels', rare),
  ]


def _label_row(
  label: str, count: int, mean: float = np.nan, high: str = ''
) -> dict[str, Any]:
  return {'label': label, 'count': count, 'mean': _rounded(mean), 'high': high}


def blocks(
  batches: Iterable[tuple[Mapping[str, Any], Int[np.ndarray, 'B L']]],
  tokenizer: Tokenizer,
  most: int,
) -> list[text_pages.Block]:
  """Returns the real rows of `analysis.token_iterations`, darkest at `most`."""
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
  """Writes tables, the curves of `found`, and a page if there are blocks.

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
