"""What a data set is: its description, its records, its legal fields.

A source gives random access to raw records. Order, augmentation, batching and
bad records are the business of the builder, so a new data set is one module
with `FIELDS`, `check_split` and `build`, and one entry in `builder.SOURCES`.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

MAX_EXAMPLES = 2**31 - 1  # record indices travel as int32
MAX_SEED = 2**32 - 1
DEFAULT_BAD_SHARE = 0.001


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
  """What a task must know to build its model.

  Attributes:
    input_key: 'image' or 'tokens'.
    input_shape: shape of one example, (height, width, 3) or (length,).
    input_dtype: 'uint8' for images, 'int32' for tokens.
    num_classes: number of labels; labels are 0 .. num_classes - 1.
    class_names: name of each label, or ().
    num_examples: number of records in the split.
    vocab_size: number of token ids; 0 for images.
  """

  input_key: str
  input_shape: tuple[int, ...]
  input_dtype: str
  num_classes: int
  class_names: tuple[str, ...]
  num_examples: int
  vocab_size: int = 0


@runtime_checkable
class Source(Protocol):
  """Random access to the raw records of one split.

  `record` returns {input_key: value, 'label': int}; an image is either encoded
  bytes or a uint8 array [H, W, 3] or [H, W, 1], tokens are int32 [L]. It may
  raise BadRecord, and is called from several threads at once.
  """

  info: DatasetInfo

  def __len__(self) -> int:
    """Number of records."""

  def record(self, index: int) -> dict[str, Any]:
    """Raw record number `index`."""

  def where(self, index: int) -> str:
    """File (and place in it) of record `index`, for error messages."""


@runtime_checkable
class VectorSource(Protocol):
  """A source that computes many records at once and cannot hold bad ones."""

  def records(self, indices: Int[np.ndarray, ' B']) -> dict[str, np.ndarray]:
    """Records as arrays with a leading batch axis: {input_key, 'label'}."""
