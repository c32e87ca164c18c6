"""Rows of a split for the analysis: spread over all of it, in batches.

Not the first ones: rows of different lengths are evaluated from the shortest
on, and rows of a corpus stand in the order of its documents.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

from dataset_lib.reader import padded
from dataset_lib.source import DrawnSource, TokenSource

BATCH = 64

Batch = dict[str, np.ndarray]


def batches(records: Any, seed: int, count: int) -> Iterator[Batch]:
  """Batches as `dataset_lib.builder` makes them, of rows like one length.

  Args:
    records: a source of rows of tokens.
    seed: of the run; what is drawn for a row follows from it.
    count: rows, or fewer if there are not as many.

  Returns:
    A generator of batches; the last of them may be short, with mask 0.
  """
  chosen = spread(len(records), count)
  if isinstance(records, TokenSource):
    chosen = chosen[np.argsort(records.lengths[chosen], kind='stable')]
  size = max(1, min(BATCH, len(chosen)))
  for start in range(0, len(chosen), size):
    rows = chosen[start : start + size]
    if isinstance(records, DrawnSource):
      arrays = records.draw(seed, np.zeros_like(rows), rows)
    else:
      arrays = records.records(rows)
    yield padded(arrays, rows, size)


def spread(rows: int, count: int) -> Int[np.ndarray, ' M']:
  """`count` of the numbers below `rows` at even distances, or all of them."""
  count = min(count, rows)
  return np.arange(count, dtype=np.int64) * rows // max(count, 1)
