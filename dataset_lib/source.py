"""Random access to the records of one split, and their description.

A data set is a dataclass that extends `Indexed`, `Batched` or `Drawn`. Its
annotated fields, one of them `split`, are its configuration.
"""

import abc
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Gt, Interval, MinLen, Predicate
from jaxtyping import Float32, Int, Int32, Shaped

from core.errors import BadRecord, ConfigError
from dataset_lib.order import Places, record_rng

Indices = Int[np.ndarray, ' B']  # of records in the split
Arrays = dict[str, Shaped[np.ndarray, '...']]  # leading axis: rows
Read = tuple[Indices, Arrays]  # what was read
BadRows = Sequence[tuple[int, BadRecord]]  # numbers in the split
Count = Callable[[BadRows], None]
MAX_EXAMPLES = 2**31 - 1  # record indices are int32

# Types of fields that several data sets have.
TrainTest = Literal['train', 'test']
Seed = Annotated[int, Interval(ge=0, le=2**32 - 1)]
Size = Annotated[int, Interval(ge=1, le=MAX_EXAMPLES)]
BadShare = Annotated[float, Interval(ge=0.0, le=0.5)]
# One class, several classes, a number, a class of each token, a class for each
# of several tasks; '' is unknown.
LabelKind = Literal['', 'class', 'classes', 'number', 'tags', 'tasks']
NumberType = Annotated[
  str,
  Predicate(re.compile('bool|(u?int|float)(8|16|32|64)|bfloat16').fullmatch),
  "the name of a type of numbers, as 'uint8'",
]
DEFAULT_BAD_SHARE = 0.001
PART_WORDS = 'or a part like train[:95%] or train[:2000]'
TextSplit = Annotated[
  str,
  Predicate(lambda split: parts(split, 'train|validation|dev|test')),
  f'train, validation, test, {PART_WORDS}',
]
_BOUND = r'(-?(?:\d{1,18}|(?:100|\d\d?)%))?'


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
  """The fields that a model is built from; saved as the contract of a run.

  A default, as of a run saved before the field was added, is not compared.
  """

  input_key: Annotated[str, MinLen(1)]  # 'image' or 'tokens'
  input_shape: tuple[int, ...]  # of one example: (height, width, 3), (length,)
  input_dtype: NumberType  # 'uint8' for images, 'int32' for tokens
  num_classes: int  # labels are 0 .. num_classes - 1; 1 for a regression
  class_names: tuple[str, ...]  # of each label, or (); 'task=class' of tasks
  num_examples: int
  vocab_size: int = 0  # token ids; 0 for images
  label_dtype: NumberType = 'int32'  # 'float32' for a regression
  # Padded lengths of batches, up to that of `input_shape`; (): one shape.
  length_buckets: tuple[int, ...] = ()
  # Rows of several labels: int32 [max_labels], padded with -1; 0: one label.
  max_labels: int = 0
  label_kind: LabelKind = ''
  unlabelled: bool = False  # rows may lack a label: -1, or NaN for a number
  # Of pixels / 255, of all channels or of each: inputs are (x - mean) / std.
  mean: Annotated[tuple[float, ...], MinLen(1)] = (0.5,)
  std: tuple[Annotated[float, Gt(0.0)], ...] = (0.5,)
  # Of evaluation, by the data set's fields; 'tokenizer': `Tokenizer.digest`.
  preprocessing: Mapping[str, Any] = dataclasses.field(
    default_factory=dict, hash=False
  )
  # Mean and standard deviation of the numbers of train; (0, 1): as they are.
  label_scale: tuple[float, Annotated[float, Gt(0.0)]] = (0.0, 1.0)
  steps_per_epoch: Annotated[int, Ge(0)] = 0  # of the training that saved it
  token_types: int = 0  # segments of a row, 2 for pairs of texts; 0: unknown
  # Of `dataset_lib.splits`: shares, seed, group, rows and a digest.
  splits: Mapping[str, Any] = dataclasses.field(
    default_factory=dict, hash=False
  )
  digest: str = ''  # of the rows and their labels; '': unknown

  def __post_init__(self) -> None:
    if self.max_labels and not self.label_kind:  # of an older run
      object.__setattr__(self, 'label_kind', 'classes')

  @property
  def label_shape(self) -> tuple[int, ...]:
    """Shape of the label of one example."""
    return (self.max_labels,) if self.max_labels else ()

  @property
  def tasks(self) -> dict[str, slice]:
    """The classes of each task, where a row has a label for each; else {}."""
    return tasks_of(self.class_names) if self.label_kind == 'tasks' else {}

  def labelled(
    self, labels: Shaped[np.ndarray, 'B ...']
  ) -> Float32[np.ndarray, ' B']:
    """Returns 1 for each row that has a label; a row of tags always has one."""
    numbers = self.label_kind == 'number' or labels.dtype.kind == 'f'
    has = np.isfinite(labels) if numbers else labels >= 0
    has |= labels.shape[1:] != self.label_shape
    return np.any(has, tuple(range(1, has.ndim))).astype(np.float32)


class Source(abc.ABC):
  """The raw records of one split, read at random from several threads."""

  # The field that names files of a user, all of whose rows are the split 'all'.
  PLACE: ClassVar[str] = ''
  # Of rows in files, which may be copies: `record` has their inputs.
  HAS_FILES: ClassVar[bool] = False

  info: DatasetInfo
  split: str
  lengths: Any = None  # of rows [N] that are padded to a bucket's length
  padding: Mapping[str, Any] = {}  # values other than 0
  sources: Sequence[str] = ()  # of rows, as their genres; () is unknown
  bad_rows: BadRows = ()
  max_bad_share: float = 0.0  # tolerated in training
  block_rows: int | None = None  # that a thread reads at once; None: a batch

  @staticmethod
  def check_fields(config: Mapping[str, Any]) -> None:
    """Raises ConfigError where fields contradict each other."""

  @staticmethod
  def prepared(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields as they are in `DatasetInfo.preprocessing`."""
    return dict(config)

  @staticmethod
  def sketch(config: Any, classes: int, examples: int) -> Any:
    """Returns info and more arrays of a row; see `builder.sketch`."""
    raise ConfigError('dataset.name', config['name'], 'one with a sketch')

  def __len__(self) -> int:
    """Returns the number of records."""
    return self.info.num_examples

  def where(self, index: int) -> str:
    """Returns the place of a record; for generated data: class and split."""
    return f'{type(self).__name__}/{self.split}'

  def places(self) -> set[str]:
    """Returns the place of each record, which tells splits apart."""
    return {self.where(index) for index in range(len(self))}

  def item(self, index: int) -> dict[str, Any]:
    """Returns a record as a request: {'text'}, perhaps 'pair', or {'image'}."""
    raise NotImplementedError

  @abc.abstractmethod
  def record(self, index: int) -> dict[str, Any]:
    """Returns {input_key: value, 'label'}; may raise BadRecord.

    An image is encoded bytes or uint8 [H, W, 3 or 1], tokens are int32 [L]; the
    label is an int, or, if `info.max_labels` > 0, a sequence of int.
    """

  @abc.abstractmethod
  def read(self, places: Places, seed: int, train: bool, count: Count) -> Read:
    """Returns the indices that were read, and arrays [B, ...], B may be 0."""


class Indexed(Source):
  """A source that reads record by record; a subclass has `record(index)`.

  Bad records are counted, and replaced by random ones, equally on all hosts.
  """

  augment: Any = True  # false: `transform` draws no numbers
  block_rows = 32

  def transform(self, value: Any, rng: Any = None) -> Any:
    """Converts a raw value to the model input, augmented if there is `rng`."""
    return value

  def read(self, places: Places, seed: int, train: bool, count: Count) -> Read:
    """See `Source`; values are transformed and checked."""
    info, indices = self.info, np.array(places.indices)
    inputs = np.zeros((len(indices), *info.input_shape), info.input_dtype)
    labels = np.zeros((len(indices), *info.label_shape), info.label_dtype)
    for row, epoch in enumerate(places.epochs.tolist()):
      index = candidate = int(indices[row])
      for attempt in itertools.count(1):  # `count` ends it
        key = seed, epoch, candidate
        rng = record_rng(*key) if train and self.augment else None
        try:
          record = self.record(candidate)
          labels[row] = check_labels(record['label'], info)
          value = self.transform(record[info.input_key], rng)
          check_input(value, info)
          break
        except BadRecord as error:
          where = error.where or self.where(candidate)
          count([(candidate, BadRecord(error.kind, where, error.message))])
          rng = record_rng(seed, epoch, index, attempt)
          candidate = int(rng.integers(len(self)))
      indices[row], inputs[row] = candidate, value
    return indices, {info.input_key: inputs, 'label': labels}


class Drawn(Source):
  """A source without bad records, whose rows change from epoch to epoch."""

  @abc.abstractmethod
  def draw(self, seed: int, epochs: Indices, indices: Indices) -> Arrays:
    """Returns arrays [B, ...] of these records in their epochs [B]."""

  def record(self, index: int) -> dict[str, Any]:
    """See `Source`; the row of epoch 0 and seed 0."""
    drawn = self.draw(0, np.zeros(1, np.int64), np.array([index]))
    return {k: v[0] for k, v in drawn.items()}

  def read(self, places: Places, seed: int, *how: Any) -> Read:
    """See `Source`."""
    return places.indices, self.draw(seed, places.epochs, places.indices)


class Batched(Drawn):
  """A source that reads in bulk; rows are the same in each epoch."""

  @abc.abstractmethod
  def records(self, indices: Indices) -> Arrays:
    """Returns arrays [B, ...] of these records."""

  def draw(self, seed: int, epochs: Indices, indices: Indices) -> Arrays:
    """See `Drawn`."""
    return self.records(indices)


def tasks_of(class_names: Sequence[str]) -> dict[str, slice]:
  """Returns the columns of each task's classes, named 'task=class'."""
  owners = [name.partition('=')[0] for name in class_names]
  return {
    task: slice(owners.index(task), owners.index(task) + owners.count(task))
    for task in dict.fromkeys(owners)
  }


def labels_of(labels: Any, classes: slice) -> Any:
  """Returns labels `[B]` of one task, -1 for none, of `[B, T]` of all tasks."""
  own = (labels >= classes.start) & (labels < classes.stop)
  return ((labels - classes.start + 1) * own).max(-1) - 1


def pad_rows(
  rows: Sequence[Any], shape: tuple[int, int], fill: int = 0
) -> Int32[np.ndarray, 'R L']:
  """Pads rows of numbers at their ends, and appends rows, up to `shape`."""
  padded = np.full(shape, fill, np.int32)
  for target, row in zip(padded, rows, strict=False):
    target[: len(row)] = row
  return padded


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
  """Returns the label, or int32 `[max_labels]`, padded; or raises BadRecord."""
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
  for name in ('dtype', 'shape'):
    expected, given = getattr(info, f'input_{name}'), getattr(value, name)
    message = f'expected {expected}, got {given}'
    require(given == expected, f'wrong_{name}', message)
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
    """Returns its rows of `size`; percentages are rounded, -1% is 99%."""

    def row(bound: str | None) -> int | None:
      if bound and bound.endswith('%'):
        share = int(bound[:-1]) + 100 * bound.startswith('-')
        return round(share * size / 100)
      return int(bound) if bound else None

    return range(size)[row(self.first) : row(self.last)]


def parts(split: str, names: str = r'\w+') -> list[Part]:
  """Returns the parts of 'train[:95%]+validation', [] if it is no split.

  `names` is a pattern, without groups, of the legal names.
  """
  part = re.compile(rf'({names})(?:\[{_BOUND}:{_BOUND}\])?')
  matches = [part.fullmatch(text) for text in split.split('+')]
  return [Part(*match.groups()) for match in matches if match and all(matches)]


def selected(
  split: str, opened: Callable[[str], Sized], names: str = r'\w+'
) -> Iterator[tuple[str, Any, range]]:
  """Yields (name, `opened(name)`: a whole split, rows) of each part.

  Raises ConfigError for a part that has none of its rows.
  """
  opened = functools.cache(opened)
  for part in parts(split, names):
    records = opened(part.name)
    rows = part.rows(len(records))
    if len(records) and not rows:
      expected = f'parts with rows; [{part.first or ""}:{part.last or ""}] '
      expected += f'selects 0 of the {len(records)} rows of {part.name!r}'
      raise ConfigError('split', split, expected)
    yield part.name, records, rows
