"""Iterations by dependency label (Simoulin and Crabbe 2021, Tables 3 to 5).

As in the paper (footnote 7), a token has the label of its word, and a label is
marked whose mean is above the mean of the labels by more than their standard
deviation.
"""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from albert_act import analysis
from albert_act.analysis_report import DEPTH, Rows, Table, rounded
from albert_act.encoder import Albert
from dataset_lib import conllu, source
from dataset_lib.conllu import Sentence
from dataset_lib.tokenizer import Tokenizer

SHOWN_LABELS = 20  # of the printed table; the file has all
NOTE = (
  '* above the mean of the labels by more than their standard deviation; '
  'labels of few words (--label_words) and words after the longest row are '
  'left out'
)
_STEP = 32  # tokens; rows are padded to multiples, each of which is compiled


def table(
  model: Albert,
  variables: Any,
  tokenizer: Tokenizer,
  sentences: Sequence[Sentence],
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
    tokenizer,
    [[word.form for word in words] for words in sentences],
    max_length,
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
    _row('words left out', left_out),
    _row(DEPTH, int(depth.count), depth.mean),
  ]
  title = f'Iterations by dependency label, {len(sentences)} sentences'
  shown = labels[:SHOWN_LABELS] + below
  return Table('labels', title, labels + below, NOTE, shown)


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
  labels = [
    _row(
      name, len(found[name]), mean, '*' if mean > over.mean + over.std else ''
    )
    for name, mean in means.items()
  ]
  rare = sum(len(parts) for name, parts in found.items() if name not in means)
  return sorted(labels, key=lambda row: (-row['count'], row['label'])), [
    _row('mean of the labels', len(labels), over.mean),
    _row('standard deviation of the labels', len(labels), over.std),
    _row('words of rarer labels', rare),
  ]


def _row(
  label: str, count: int, mean: float = np.nan, high: str = ''
) -> dict[str, Any]:
  return {'label': label, 'count': count, 'mean': rounded(mean), 'high': high}
