"""The iterations of a run: tables, curves, a page of coloured sentences.

Dependency labels as in Simoulin and Crabbe (2021), Tables 3 to 5: a token has
the label of its word (footnote 7). Labels are marked if mean > mean of labels +
standard deviation of labels.
"""

import collections
import dataclasses
import functools
import html
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from albert_act.encoder import Albert
from benchmarks import pictures, read_iterations
from benchmarks.read_iterations import CURVES, DEPTH, Analysis
from core import files
from core.errors import BadRecord, InvalidDataError
from dataset_lib import builder, source, tagged_words, token_rows, tokenizer
from dataset_lib.tokenizer import Tokenizer
from eval_lib import plots
from eval_lib.report import Table
from train_lib.run_directory import TOKENIZER

MODEL, SPLIT = Albert, 'validation'
_STEP = 32  # tokens; rows are padded to multiples, each of which is compiled

_OPAQUE = 170  # of 255, at most iterations: light enough to read on
_MARK = '▁'  # SentencePiece's space
_SPECIAL = re.compile(r'\[.+\]|<.+>')
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Iterations of each token</title>
<body style="max-width:60em; line-height:1.7; font-family:monospace">
{body}
</html>
"""

Rows = list[dict[str, Any]]


def tables(analysis: Analysis) -> list[Table]:
  lines = {
    f'{kind}{suffix}': analysis.curves[name][kind]
    for kind in analysis.curves['cosine, all tokens']
    for name, suffix in CURVES.items()
  }
  limit = len(lines['all'])
  similarity = [
    {'iteration': n + 1}
    | {name: _rounded(line[n], 6) for name, line in lines.items()}
    for n in range(limit)
  ]
  kinds = analysis.iterations
  iterations = [
    _row('tokens', kind, count, mean, std=_rounded(std))
    for kind, (count, mean, std) in kinds.items()
  ]
  tokens, depth = (kinds[kind][1] / limit for kind in ('all', DEPTH))
  return [
    Table(
      'iterations', f'Iterations, at most {limit}', iterations,
      f'tokens take {tokens:.0%} of the iterations, rows that wait for their '
      f'last token {depth:.0%}',
    ),
    Table(
      'similarity', 'Cosine of states before and after', similarity,
      'a halted token counts as 1 in all, and not in running, the mean over '
      'the share that still runs',
      ['iteration', *(f'all{suffix}' for suffix in CURVES.values())],
    ),
  ]  # fmt: skip


def _row(
  column: str, name: str, count: int, mean: float = np.nan, **others: Any
) -> dict[str, Any]:
  return {column: name, 'count': count, 'mean': _rounded(mean), **others}


def _rounded(value: float, digits: int = 4) -> float | None:
  return None if np.isnan(value) else round(float(value), digits)


def label_table(
  model: Albert,
  variables: Any,
  tokenizer: Tokenizer,
  sentences: Sequence[Sequence[tuple[str, str]]],
  max_length: int,
  at_least: int = 1,
) -> Table:
  """Analyses sentences, lists of (word, label), of a treebank.

  Subtypes are merged, as nmod:poss into nmod. Labels of less than `at_least`
  words, and words after `max_length` tokens are left out.
  """
  encoded, places = tagged_words.encode_words(
    tokenizer, [[word for word, _ in pairs] for pairs in sentences], max_length
  )
  buckets = token_rows.length_buckets(
    range(_STEP, max_length, _STEP), max_length
  )
  info = source.DatasetInfo(
    'tokens', (max_length,), 'int32', 1, (), len(sentences),
    length_buckets=buckets,
  )  # fmt: skip
  records = token_rows.TokenSource(
    info, encoded, np.zeros(len(sentences)), tokenizer.pad_id
  )
  batches = builder.spread(records, len(sentences)).batches()
  depths, words = [], []
  for batch, steps, _ in read_iterations.traced(model, variables, batches):
    for row in np.flatnonzero(batch['mask']):
      number = batch['index'][row]
      depths.append(steps[row].max())
      pairs = zip(sentences[number], places[number], strict=False)
      words += [
        (label.partition(':')[0], steps[row, start:stop])
        for (_, label), (start, stop) in pairs
        if label != tagged_words.NO_TAG
      ]
  labels, below = label_rows(words, at_least)
  left_out = sum(map(len, sentences)) - len(words)
  below.append(_row('label', 'words left out', left_out))
  below.append(_row('label', DEPTH, len(depths), np.mean(depths)))
  return Table(
    'labels', f'Iterations by dependency label, {len(sentences)} sentences',
    labels + below,
    '* above the mean of the labels by more than their standard deviation; '
    'labels of few words (--label_words), words without a label and words '
    'after the longest row are left out',
  )  # fmt: skip


def label_rows(
  words: Iterable[tuple[str, Int[np.ndarray, ' _']]], at_least: int
) -> tuple[Rows, Rows]:
  """Averages iterations over the tokens of the words of each label.

  Returns rows of labels of `at_least` words, the most frequent first, and
  summary rows. A word without tokens does not count.
  """
  of_label: dict[str, list[Any]] = collections.defaultdict(list)
  for name, steps in words:
    if len(steps):
      of_label[name].append(steps)
  means = {
    name: float(np.concatenate(steps).mean())
    for name, steps in of_label.items()
    if len(steps) >= at_least
  }
  values = [*means.values()] or [np.nan]
  average, std = float(np.mean(values)), float(np.std(values))
  labels = [
    _row('label', name, len(of_label[name]), mean,
         high='*' if mean > average + std else '')
    for name, mean in means.items()
  ]  # fmt: skip
  labels.sort(key=lambda row: (-row['count'], row['label']))
  rare = sum(len(own) for name, own in of_label.items() if name not in means)
  return labels, [
    _row('label', 'mean of the labels', len(labels), average, high=''),
    _row('label', 'standard deviation of the labels', len(labels), std),
    _row('label', 'words of rarer labels', rare),
  ]


def words(names: Sequence[str]) -> Iterator[tuple[str, bool]]:
  """Yields the text of each token, and whether it continues a word.

  In WordPiece a token that continues a word begins with '##'; in SentencePiece
  one that begins a word has a '▁', which tells the two apart.
  """
  is_sentencepiece = any(name.startswith(_MARK) for name in names)
  for name in names:
    if is_sentencepiece:
      is_start = name.startswith(_MARK) or _SPECIAL.fullmatch(name)
      yield ' ' if name == _MARK else name.removeprefix(_MARK), not is_start
    else:
      is_piece = name.startswith('##') and len(name) > 2
      yield name[2:] if is_piece else name, is_piece


def page(
  batches: Iterable[read_iterations.Traced],
  names: Callable[[list[int]], Sequence[str]],
  most: int,
) -> str:
  """Returns the real rows of `traced` as HTML; `names` of token ids."""
  numbers = range(1, most + 1)
  body = _paragraph('iterations', [*map(str, numbers)], numbers, most)
  for batch, steps, _ in batches:
    for row in np.flatnonzero(batch['mask']):
      spent = steps[row, : batch['length'][row]]
      tokens = names(batch['tokens'][row, : len(spent)].tolist())
      title = f'mean {spent.mean():.1f}, executed {spent.max()}'
      body += _paragraph(title, tokens, spent.tolist(), most)
  return _PAGE.format(body=body)


def _paragraph(
  title: str, names: Sequence[str], iterations: Sequence[int], most: int
) -> str:
  text = f'<p><b>\n{title}\n</b><br>\n'
  for (word, is_glued), spent in zip(words(names), iterations, strict=True):
    fill = f'{plots.COLOURS[0]}{round(_OPAQUE * spent / most):02x}'
    look = f'style="background:{fill}" title="{spent} of {most}"'
    space = '' if is_glued else '\n'
    text += f'{space}<span {look}>{html.escape(word)}</span>'
  return text


def write(
  flags: Any, config: Any, split: str, loaded: Any, out: pathlib.Path
) -> list[Table]:
  """Draws the curves and writes the page of a run; returns the tables."""
  labelled = read_treebank(flags.treebank)
  records = builder.build_source(config.dataset, split, loaded.task.info)
  words = tokenizer.load(pathlib.Path(flags.workdir) / TOKENIZER)
  model = dataclasses.replace(loaded.task.model, dynamic=False, remat_chunk=0)
  spread = functools.partial(builder.spread, records, seed=config.seed)
  rows = spread(flags.rows).batches()
  analysis = read_iterations.analyse(model, loaded.variables, rows)
  result = tables(analysis)
  if labelled:
    limits = records.info.input_shape[0], flags.label_words
    labels = label_table(model, loaded.variables, words, labelled, *limits)
    result.append(labels)
  if flags.sentences:
    rows = spread(flags.sentences).batches()
    shown = read_iterations.traced(model, loaded.variables, rows)
    write_page(out, page(shown, words.names, model.max_iterations))
  with plots.if_installed():
    title = 'Similarity of consecutive states'
    pictures.plot_iterations(out / 'similarity', analysis.curves, title)
  return result


def read_treebank(file: str) -> list[list[tuple[str, str]]]:
  """Returns (word, dependency label or '_') of each sentence; prints faults."""
  sentences, bad = [], []
  path = pathlib.Path(file).expanduser()
  rows = tagged_words.TaggedFile(path, 'deprel') if file else ()
  for row in range(len(rows)):
    try:
      sentences.append(rows[row])
    except BadRecord as fault:
      bad.append(fault)
  if file and not sentences:
    first = f'; the first: {bad[0]}' if bad else ''
    raise InvalidDataError(
      f'{file}: expected sentences in CoNLL-U, none of its {len(rows)} can be '
      f'used{first}'
    )
  if bad:
    line = f'{file}: {len(bad)} sentences with faults are left out; the first'
    print(f'{line}: {bad[0]}', file=sys.stderr)
  return sentences


def write_page(out: pathlib.Path, page: str) -> None:
  """Writes a page; a lone surrogate in a token becomes a reference."""
  content = page.encode(errors='xmlcharrefreplace')
  files.write_bytes(out / 'sentences.html', content)
