"""Iterations by dependency label (Simoulin and Crabbe 2021, Tables 3 to 5).

As in the paper (its footnote 7), a token has the label of the word that it is a
piece of, and a label is marked whose mean is above the mean of the labels by
more than their standard deviation.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from albert_act.analysis import Moments, token_iterations
from albert_act.encoder import Albert
from dataset_lib import word_tokens
from dataset_lib.conllu import Sentence
from dataset_lib.source import Encoded
from dataset_lib.tokenizer import Tokenizer
from serve_lib.text_items import padded

BATCH = 32  # sentences that are run at once
_STEP = 32  # tokens; lengths are rounded up, for each is compiled


@dataclasses.dataclass(frozen=True)
class Label:
  """Iterations of the words with a dependency label.

  Attributes:
    name: of the label.
    count: words that have it.
    mean: iterations of their tokens.
    is_high: whether the mean is above the labels' mean by more than their
      standard deviation.
  """

  name: str
  count: int
  mean: float
  is_high: bool


@dataclasses.dataclass(frozen=True)
class LabelFindings:
  """What a pass over a treebank found.

  Attributes:
    labels: the most frequent first.
    mean: of the means of the labels; NaN if there is none.
    std: their standard deviation.
    depth: of the sentences: iterations until the last token has halted.
    left_out: words behind the longest row.
    rare: words of labels that too few have to be counted.
  """

  labels: list[Label]
  mean: float
  std: float
  depth: Moments
  left_out: int
  rare: int


def analyse(
  model: Albert,
  variables: Any,
  tokenizer: Tokenizer,
  sentences: Sequence[Sentence],
  max_length: int,
  at_least: int = 1,
) -> LabelFindings:
  """One pass over a treebank.

  Args:
    model: its masked form.
    variables: its variables.
    tokenizer: of the model.
    sentences: of `dataset_lib.conllu`; subtypes of labels are taken together.
    max_length: longest row in tokens; words behind it are left out.
    at_least: words that a label must have to be counted.

  Raises:
    ValueError: max_length is too small.
  """
  encoded, places = word_tokens.encode_words(
    tokenizer, [sentence.forms for sentence in sentences], max_length
  )
  depth, left_out = Moments(), 0
  words: list[tuple[str, Int[np.ndarray, ' T']]] = []
  for number, steps in _iterations(model, variables, encoded, tokenizer.pad_id):
    depth.add(steps.max(keepdims=True))
    own, spans = sentences[number].words, places[number]
    left_out += len(own) - len(spans)
    words += [
      (word.universal_label, steps[start:stop])
      for word, (start, stop) in zip(own, spans, strict=False)
    ]
  labels, mean, std = by_label(words, at_least)
  rare = sum(len(steps) > 0 for _, steps in words)
  rare -= sum(label.count for label in labels)
  return LabelFindings(labels, mean, std, depth, left_out, rare)


def by_label(
  words: Iterable[tuple[str, Int[np.ndarray, ' _']]], at_least: int = 1
) -> tuple[list[Label], float, float]:
  """Iterations by dependency label, the most frequent label first.

  Args:
    words: (label, iterations of its tokens) of each word; one without tokens
      does not count.
    at_least: words that a label must have to be counted.

  Returns:
    (labels, mean and standard deviation over the means of the labels).
  """
  found: dict[str, list[Int[np.ndarray, ' T']]] = collections.defaultdict(list)
  for name, steps in words:
    if len(steps):
      found[name].append(steps)
  kept = {k: v for k, v in found.items() if len(v) >= at_least}
  means = {k: float(np.concatenate(v).mean()) for k, v in kept.items()}
  center = float(np.mean(list(means.values()))) if means else float('nan')
  spread = float(np.std(list(means.values()))) if means else float('nan')
  labels = [
    Label(name, len(kept[name]), mean, mean > center + spread)
    for name, mean in means.items()
  ]
  return sorted(labels, key=lambda x: (-x.count, x.name)), center, spread


def _iterations(
  model: Albert, variables: Any, encoded: Encoded, pad_id: int
) -> Iterator[tuple[int, Int[np.ndarray, ' T']]]:
  """(number of a row, iterations of its tokens), the shortest rows first."""
  order = np.argsort(encoded.lengths, kind='stable')
  longest = int(encoded.lengths.max())
  parts = [order[n : n + BATCH] for n in range(0, len(order), BATCH)]

  def batches():
    for part in parts:
      rows = [_row(encoded, int(number)) for number in part]
      length = -(-len(rows[-1]['tokens']) // _STEP) * _STEP
      yield padded(rows, min(length, longest), BATCH, pad_id)

  found = token_iterations(model, variables, batches())
  for part, (batch, steps) in zip(parts, found, strict=True):
    for row, number in enumerate(part):
      yield int(number), steps[row, : batch['length'][row]]


def _row(encoded: Encoded, number: int) -> dict[str, Int[np.ndarray, ' T']]:
  start, stop = encoded.offsets[number : number + 2]
  return {
    'tokens': encoded.tokens[start:stop],
    'token_types': encoded.token_types[start:stop],
  }
