"""Rows of token ids of different lengths, padded in batches."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64, Shaped

from core.errors import BadRecord
from dataset_lib.order import Places
from dataset_lib.source import Arrays, Batched, DatasetInfo, Indices


@dataclasses.dataclass(frozen=True)
class Encoded:
  """Rows of token ids of different lengths, concatenated.

  Row i is `tokens[offsets[i]:offsets[i + 1]]`; `token_types` is the segment of
  each token, 0 or 1.
  """

  tokens: Int32[np.ndarray, ' M']
  token_types: Int32[np.ndarray, ' M']
  offsets: Int64[np.ndarray, ' O']

  @property
  def lengths(self) -> Int32[np.ndarray, ' N']:
    """Tokens in each row."""
    return np.diff(self.offsets).astype(np.int32)


class TokenSource(Batched):
  """Records that are rows of token ids, kept without padding.

  The last length bucket of `info` holds every row.
  """

  def __init__(
    self,
    info: DatasetInfo,
    encoded: Encoded,
    labels: Shaped[np.ndarray, ' N'],
    pad_id: int,
    where: Callable[[int], str],
    bad_rows: Sequence[tuple[int, BadRecord]] = (),
  ):
    segments = int(encoded.token_types.max(initial=0)) + 1
    self.info = dataclasses.replace(info, token_types=segments)
    self._where, self.bad_rows = where, tuple(bad_rows)
    self.lengths = encoded.lengths
    # Padding values other than 0.
    self.padding = {'tokens': pad_id, 'length': 1}
    self._encoded, self._labels = encoded, labels.astype(info.label_dtype)

  def where(self, index: int) -> str:
    """See `Source`."""
    return self._where(index)

  def read(self, places: Places, *how: Any) -> tuple[Indices, Arrays]:
    """See `Source`."""
    return places.indices, self.records(places.indices, places.length or None)

  def records(self, indices: Indices, length: int | None = None) -> Arrays:
    """Returns records padded to `length`, or to the bucket that holds them.

    They are {'tokens', 'token_types': int32 [B, length], 'length': int32 [B],
    'label': `label_dtype` [B]}.
    """
    lengths = self.lengths[indices]
    if length is None:
      longest = lengths.max(initial=1)
      length = min(size for size in self.info.length_buckets if size >= longest)
    column = np.arange(length)
    valid = column < lengths[:, None]
    places = (self._encoded.offsets[indices][:, None] + column)[valid]
    tokens = np.full(valid.shape, self.padding['tokens'], np.int32)
    tokens[valid] = self._encoded.tokens[places]
    types = np.zeros(valid.shape, np.int32)
    types[valid] = self._encoded.token_types[places]
    label = self._labels[indices]
    return dict(tokens=tokens, token_types=types, length=lengths, label=label)

  def record(self, index: int) -> dict[str, Any]:
    """Returns tokens and types int32 [L] without padding, and the label."""
    row = slice(*self._encoded.offsets[index : index + 2])
    return {
      'tokens': self._encoded.tokens[row],
      'token_types': self._encoded.token_types[row],
      'label': self._labels[index].item(),
    }


def length_buckets(sizes: Sequence[int], max_length: int) -> tuple[int, ...]:
  """Returns the sizes below `max_length`, and `max_length`."""
  return (*(size for size in sizes if size < max_length), max_length)
