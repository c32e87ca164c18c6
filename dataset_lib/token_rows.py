"""Rows of token ids of different lengths, padded in batches."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64, Shaped

from dataset_lib.order import Places
from dataset_lib.source import Arrays, Batched, DatasetInfo, Indices


@dataclasses.dataclass(frozen=True)
class Encoded:
  """Concatenated rows of token ids; `token_types` are segments, 0 or 1."""

  tokens: Int32[np.ndarray, ' M']
  token_types: Int32[np.ndarray, ' M']
  offsets: Int64[np.ndarray, ' O']  # starts of the rows, and the last end

  @property
  def lengths(self) -> Int32[np.ndarray, ' N']:
    """Tokens in each row."""
    return np.diff(self.offsets).astype(np.int32)


class TokenSource(Batched):
  """Rows of token ids, padded when read; the last length bucket holds all."""

  def __init__(
    self,
    info: DatasetInfo,
    encoded: Encoded,
    labels: Shaped[np.ndarray, 'N ...'],
    pad_id: int,
  ):
    segments = int(encoded.token_types.max(initial=0)) + 1
    self.info = dataclasses.replace(info, token_types=segments)
    self.lengths = encoded.lengths
    self.padding = {'tokens': pad_id, 'length': 1}
    self._encoded, self._labels = encoded, labels.astype(info.label_dtype)

  def read(self, places: Places, *how: Any) -> tuple[Indices, Arrays]:
    """See `Source`."""
    return places.indices, self.records(places.indices, places.length or None)

  def records(self, indices: Indices, length: int | None = None) -> Arrays:
    """Returns rows padded to `length`, or to the bucket that holds them.

    {'tokens', 'token_types': int32 [B, length], 'length': int32 [B], 'label'}.
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
      'label': self._labels[index].tolist(),
    }


def length_buckets(sizes: Sequence[int], max_length: int) -> tuple[int, ...]:
  """Returns the sizes below `max_length`, and `max_length`."""
  return (*(size for size in sizes if size < max_length), max_length)
