"""Random access to the records of one split, and their description.

A data set is a dataclass that extends `Source`, as `synthetic.Parity`; its
annotated fields, `split` among them, are its configuration.
A configuration names it as 'package.module:Class', or by a short name in
`builder.SOURCES`.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Gt, Interval, MinLen, Predicate
from jaxtyping import Float32, Int, Int32, Int64, Shaped

from core.errors import BadRecord, ConfigError

MAX_EXAMPLES = 2**31 - 1  # record indices are int32

# Types of fields that several data sets have.
TrainTest = Literal['train', 'test']
Seed = Annotated[int, Interval(ge=0, le=2**32 - 1)]
Size = Annotated[int, Interval(ge=1, le=MAX_EXAMPLES)]
BadShare = Annotated[float, Interval(ge=0.0, le=0.5)]
MaxLabels = Annotated[int, Interval(ge=0, le=4096)]  # 0: one label a row
# One class, several classes, a number, a class of each token; '' is unknown.
LabelKind = Literal['', 'class', 'classes', 'number', 'tags']
NumberType = Annotated[
  str,
  Predicate(re.compile('bool|(u?int|float)(8|16|32|64)|bfloat16').fullmatch),
  "the name of a type of numbers, as 'uint8'",
]
DEFAULT_BAD_SHARE = 0.001
PART_WORDS = 'or a part like train[:95%] or train[:2000]'
AnySplit = Annotated[
  str,
  Predicate(lambda split: parts(split)),
  "a split or a part, like 'train[:90%]'",
]
TextSplit = Annotated[
  str,
  Predicate(lambda split: parts(split, 'train|validation|dev|test')),
  f'train, validation, test, {PART_WORDS}',
]
_BOUND = r'(-?(?:\d{1,18}|(?:100|\d\d?)%))?'
_PART = rf'(?:\[{_BOUND}:{_BOUND}\])?'


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
  """What a model is built from; saved as the contract of a run.

  `dataset_lib.contract` compares two of them. A run that was saved before a
  field was added has its default, which is unknown and not compared.
  """

  input_key: Annotated[str, MinLen(1)]  # 'image' or 'tokens'
  input_shape: tuple[int, ...]  # of one example: (height, width, 3), (length,)
  input_dtype: NumberType  # 'uint8' for images, 'int32' for tokens
  num_classes: int  # labels are 0 .. num_classes - 1; 1 for a regression
  class_names: tuple[str, ...]  # of each label, or ()
  num_examples: int
  vocab_size: int = 0  # token ids; 0 for images
  label_dtype: NumberType = 'int32'  # 'float32' for a regression
  # Lengths that batches are padded to, ascending, the last one being that of
  # `input_shape`; () where all examples have one shape.
  length_buckets: tuple[int, ...] = ()
  # Rows of several labels: int32 [max_labels], padded with -1; 0: one label.
  max_labels: int = 0
  label_kind: LabelKind = ''
  # Rows may lack a label, which is then -1, or NaN for a number.
  unlabelled: bool = False
  # Of pixels / 255, of all channels or of each: inputs are (x - mean) / std.
  mean: Annotated[tuple[float, ...], MinLen(1)] = (0.5,)
  std: tuple[Annotated[float, Gt(0.0)], ...] = (0.5,)
  # How evaluation prepares an input, by the names of the data set's fields;
  # 'tokenizer' is a `Tokenizer.digest`.
  preprocessing: Mapping[str, Any] = dataclasses.field(
    default_factory=dict, hash=False
  )
  steps_per_epoch: Annotated[int, Ge(0)] = 0  # of the training that saved it
  token_types: int = 0  # segments of a row, 2 for pairs of texts; 0: unknown

  def __post_init__(self) -> None:
    if self.max_labels and not self.label_kind:  # of an older run
      object.__setattr__(self, 'label_kind', 'classes')

  @property
  def label_shape(self) -> tuple[int, ...]:
    """Shape of the label of one example."""
    return (self.max_labels,) if self.max_labels else ()

  def labelled(
    self, labels: Shaped[np.ndarray, 'B ...']
  ) -> Float32[np.ndarray, ' B']:
    """Returns 1 for each row of a batch that has a label, 0 for the others.

    A number is one if it is finite; a row of tags always has a label.
    """
    numbers = self.label_kind == 'number' or labels.dtype.kind == 'f'
    has = np.isfinite(labels) if numbers else labels >= 0
    has |= labels.shape[1:] != self.label_shape
    return np.any(has, tuple(range(1, has.ndim))).astype(np.float32)


class Source:
  """Random access to the raw records of one split, from several threads.

  A subclass sets `info` and has `record`; or `records(indices)`, which reads in
  bulk, as arrays [B, ...], B may be 0, and must not raise BadRecord; or `draw(
  seed, epochs, indices)`, the same for data that change per epoch.
  """

  info: DatasetInfo
  records: Any = None
  draw: Any = None
  where: Any = None  # function of an index: the file and line of a record
  lengths: Any = None  # of rows [N] that are padded to a bucket's length
  padding: Mapping[str, Any] = {}  # values other than 0
  bad_rows: Sequence[tuple[int, BadRecord]] = ()  # numbers in the split
  max_bad_share: float = 0.0  # tolerated in training
  augment: Any = True  # false: `transform` draws no numbers

  @staticmethod
  def check_fields(config: Mapping[str, Any]) -> None:
    """Raises ConfigError where fields contradict each other."""

  @staticmethod
  def prepared(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields as they are in `DatasetInfo.preprocessing`."""
    return dict(config)

  def transform(self, value: Any, rng: Any = None) -> Any:
    """Converts a raw value to the model input, augmented if there is `rng`."""
    return value

  def __len__(self) -> int:
    """Returns the number of records."""
    return self.info.num_examples

  def record(self, index: int) -> dict[str, Any]:
    """Returns {input_key: value, 'label': int}; may raise BadRecord.

    An image is encoded bytes or uint8 [H, W, 3 or 1], tokens are int32 [L]. If
    `info.max_labels` > 0, 'label' is a sequence of int, also an empty one.
    """
    return {k: v[0] for k, v in self.records(np.array([index])).items()}


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


def pad_rows(
  rows: Sequence[Any], shape: tuple[int, int], fill: int = 0
) -> Int32[np.ndarray, 'R L']:
  """Pads rows of numbers at their ends, and appends rows, up to `shape`."""
  padded = np.full(shape, fill, np.int32)
  for target, row in zip(padded, rows, strict=False):
    target[: len(row)] = row
  return padded


class TokenSource(Source):
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
    self.where, self.bad_rows = where, tuple(bad_rows)
    self.lengths = encoded.lengths
    # Padding values other than 0.
    self.padding = {'tokens': pad_id, 'length': 1}
    self._encoded, self._labels = encoded, labels.astype(info.label_dtype)

  def records(
    self, indices: Int[np.ndarray, ' B'], length: int | None = None
  ) -> dict[str, np.ndarray]:
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


def where(records: Source, index: int) -> str:
  """Returns the place of a record; for generated data: class and split."""
  if records.where:
    return records.where(index)
  return f'{type(records).__name__}/{getattr(records, "split", "")}'


def places(records: Source) -> set[str]:
  """Returns the place of each record, which tells rows of two splits apart."""
  return {where(records, index) for index in range(len(records))}


def length_buckets(sizes: Sequence[int], max_length: int) -> tuple[int, ...]:
  """Returns the sizes below `max_length`, and `max_length`."""
  return (*(size for size in sizes if size < max_length), max_length)


def require(holds: Any, kind: str, message: str) -> None:
  """Raises a BadRecord of this kind unless `holds` is true."""
  if not holds:
    raise BadRecord(kind, '', message)


def check_label(label: Any, num_classes: int) -> int:
  """Returns the label; BadRecord if not an integer in [0, num_classes - 1]."""
  is_integer = type(label) is int or isinstance(label, np.integer)
  require(is_integer, 'wrong_dtype', f'label {label!r} is not an integer')
  message = f'label {label} not in [0, {num_classes - 1}]'
  require(0 <= label < num_classes, 'label_out_of_range', message)
  return int(label)


def check_labels(labels: Any, info: DatasetInfo) -> Any:
  """Returns the label; if a row has several, int32 `[max_labels]`, -1 padded.

  Raises BadRecord for one that is no class, or for too many.
  """
  if info.unlabelled and np.array_equal(labels, -1):
    return labels
  if not info.max_labels:
    return check_label(labels, info.num_classes)
  count, most = len(labels), info.max_labels
  message = f'{count} labels, more than dataset.max_labels = {most}'
  require(count <= most, 'too_many_labels', message)
  checked = [check_label(label, info.num_classes) for label in labels]
  return pad_rows([checked], (1, most), fill=-1)[0]


def check_input(value: np.ndarray, info: DatasetInfo) -> None:
  """Raises BadRecord for a wrong shape or dtype, or an unknown token id."""
  for kind, expected, given in (
    ('wrong_dtype', info.input_dtype, value.dtype),
    ('wrong_shape', info.input_shape, value.shape),
  ):
    require(given == expected, kind, f'expected {expected}, got {given}')
  if info.vocab_size:
    low, high, limit = value.min(), value.max(), info.vocab_size - 1
    message = f'token ids {low}..{high} not in [0, {limit}]'
    require(0 <= low <= high <= limit, 'token_out_of_range', message)


class Part(NamedTuple):
  """A part of a split, such as 'train[5:90%]', and its bounds as written."""

  name: str
  first: str | None
  last: str | None

  def rows(self, size: int) -> range:
    """Returns its rows of `size`; percentages round to the nearest row.

    -1% is 99%, so that [:-1%] and [-1%:] are a partition, as [:n] and [n:].
    """

    def row(bound: str | None) -> int | None:
      if bound and bound.endswith('%'):
        share = int(bound[:-1]) + 100 * bound.startswith('-')
        return round(share * size / 100)
      return int(bound) if bound else None

    return range(size)[row(self.first) : row(self.last)]


def parts(split: str, names: str = r'\w+') -> list[Part]:
  """Returns the parts of 'train[:95%]+validation'; [] if it is no such split.

  `names` is a pattern, without groups, of the legal names.
  """
  part = re.compile(f'({names}){_PART}')
  matches = [part.fullmatch(text) for text in split.split('+')]
  return [Part(*match.groups()) for match in matches if match and all(matches)]


def selected(
  split: str, opened: Callable[[str], Sized], names: str = r'\w+'
) -> list[tuple[str, Any, range]]:
  """Returns (name, whole split, rows) of each part; the rule of every source.

  `opened(name)` returns a whole split. Raises ConfigError for a part that has
  none of its rows.
  """
  result, opened = [], functools.cache(opened)
  for part in parts(split, names):
    whole = opened(part.name)
    rows = part.rows(len(whole))
    if len(whole) and not rows:
      expected = f'parts with rows; [{part.first or ""}:{part.last or ""}] '
      expected += f'selects 0 of the {len(whole)} rows of {part.name!r}'
      raise ConfigError('split', split, expected)
    result.append((part.name, whole, rows))
  return result
