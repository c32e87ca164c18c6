"""What a data set is: its description, its records, its legal fields.

A source gives random access to raw records. Order, augmentation, batching and
bad records are the business of the builder, so a new data set is one module
with `FIELDS`, `check_split` and `build`, and one entry in `builder.SOURCES`.
"""

import dataclasses
import difflib
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from dataset_lib.errors import ConfigError

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


@runtime_checkable
class ConfigLike(Protocol):
  """A mapping with string keys, or an ml_collections ConfigDict."""

  def items(self) -> Iterable[tuple[str, Any]]:
    """Pairs of field name and value."""


@dataclasses.dataclass(frozen=True)
class Field:
  """One legal field of a data set's configuration.

  Attributes:
    expected: the legal range in words, shown when a value is rejected.
    accepts: whether a value is legal.
    default: value when the field is absent; REQUIRED if it must be given.
  """

  expected: str
  accepts: Callable[[Any], bool]
  default: Any


REQUIRED = object()


def integer(low: int, high: int, default: Any = REQUIRED) -> Field:
  """An integer in [low, high]; True and 3.0 are not integers."""

  def accepts(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
      return False
    return low <= int(value) <= high

  return Field(f'an integer in [{low}, {high}]', accepts, default)


def real(low: float, high: float, default: Any = REQUIRED) -> Field:
  """A finite number in [low, high]."""

  def accepts(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
      return False
    return low <= float(value) <= high  # False for NaN

  return Field(f'a number in [{low}, {high}]', accepts, default)


def text(expected: str, default: Any = REQUIRED) -> Field:
  """A string; empty only where '' is the default."""

  def accepts(value: Any) -> bool:
    return isinstance(value, str) and (bool(value) or default == '')

  return Field(expected, accepts, default)


def names(allowed: Iterable[str], default: Any = REQUIRED) -> Field:
  """A tuple of distinct names out of `allowed`."""
  allowed = tuple(allowed)

  def accepts(value: Any) -> bool:
    return (
      isinstance(value, (tuple, list))
      and all(isinstance(name, str) and name in allowed for name in value)
      and len(set(value)) == len(value)
    )

  return Field(
    f'a tuple of distinct names out of {", ".join(allowed)}', accepts, default
  )


def check_field(key: str, value: Any, field: Field) -> None:
  """Raises ConfigError unless `value` is legal for `field`."""
  if not field.accepts(value):
    raise ConfigError(key, value, field.expected)


def check_fields(
  config: ConfigLike, fields: Mapping[str, Field], prefix: str
) -> dict[str, Any]:
  """The configuration completed with defaults.

  Args:
    config: field names and values.
    fields: the legal fields.
    prefix: dotted path before the field names in messages, like 'dataset'.

  Raises:
    ConfigError: a field is unknown, missing or has an illegal value.
  """
  given = dict(config.items())
  for name in given:
    if name not in fields:
      raise ConfigError(f'{prefix}.{name}', given[name], _suggest(name, fields))
  complete = {}
  for name, field in fields.items():
    value = given.get(name, field.default)
    if value is REQUIRED:
      raise ConfigError(f'{prefix}.{name}', 'nothing', field.expected)
    check_field(f'{prefix}.{name}', value, field)
    complete[name] = tuple(value) if isinstance(value, list) else value
  return complete


def _suggest(name: str, fields: Mapping[str, Field]) -> str:
  expected = f'no such field; legal fields are {", ".join(fields)}'
  close = difflib.get_close_matches(str(name), fields, n=1)
  return expected + (f' (did you mean {close[0]}?)' if close else '')


def check_one_of(key: str, value: Any, allowed: Iterable[str]) -> None:
  """Raises ConfigError unless `value` is one of the allowed names."""
  allowed = tuple(allowed)
  if not (isinstance(value, str) and value in allowed):
    raise ConfigError(key, value, f'one of {", ".join(allowed)}')
