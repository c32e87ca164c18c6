"""From a configuration to global batches, sharded over hosts and resumable.

`build` gives a Dataset whose `batches(start_step)` yields this host's rows of
every global batch from that step on. Grain runs the threads and prefetches;
order, augmentation and replacements are functions of (seed, epoch, index).
"""

import contextlib
import dataclasses
import numbers
import os
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Interval

from dataset_lib import fields, source
from dataset_lib.errors import ConfigError
from dataset_lib.fields import ConfigLike
from dataset_lib.order import LengthOrder, Order, local_rows, record_rng
from dataset_lib.reader import (
  ROWS_PER_BLOCK,
  BadRecords,
  Batch,
  Reader,
  Transform,
  concatenate,
)
from dataset_lib.source import (
  DatasetInfo,
  Source,
  TokenSource,
  VectorSource,
)

# Short names of data sets; a configuration may name any other as module:Class.
SOURCES = {
  'parity': 'dataset_lib.synthetic:Parity',
  'digits': 'dataset_lib.digits:Digits',
  'folder': 'dataset_lib.image_folder:ImageFolder',
  'tfds': 'dataset_lib.tfds:TfdsImages',
  'glue': 'dataset_lib.glue:Glue',
  'probing': 'dataset_lib.probing:Probing',
  'fake_images': 'dataset_lib.synthetic:FakeImages',
  'fake_text': 'dataset_lib.synthetic:FakeText',
  'pretraining': 'dataset_lib.pretraining:Pretraining',
}

MAX_THREADS = 32  # beyond this Python's lock, not the cores, is the limit
DEFAULT_PREFETCH = 2
_Small = Annotated[int, Interval(ge=0, le=1024)]
_Positive = Annotated[int, Interval(ge=1, le=1024)]


def validate(config: Any, split: Any = None) -> dict[str, Any]:
  """Returns a configuration completed with defaults, without reading data.

  Args:
    config: the `dataset` part of a run's configuration.
    split: name of a split, to be checked as well.

  Raises:
    ConfigError: a field or the split is not legal.
  """
  if not isinstance(config, ConfigLike):
    raise ConfigError('dataset', config, "a mapping with a field 'name'")
  given = dict(config.items())
  name = given.pop('name', None)
  kind = _find(name)
  complete = fields.check(kind, given, 'dataset', without=('split',))
  if hasattr(kind, 'check_fields'):
    kind.check_fields(complete)
  if split is not None:
    legal = typing.get_type_hints(kind, include_extras=True)['split']
    fields.check_value('split', split, legal)
  return {'name': name, **complete}


def _find(name: Any) -> type:
  """Returns the class of a data set."""
  if isinstance(name, str) and ':' in name:
    kind = fields.locate(name, 'dataset.name')
    legal = getattr(kind, '__dataclass_fields__', {})
    if 'split' not in legal or not hasattr(kind, 'record'):
      expected = 'a dataclass with a field split and a method record'
      raise ConfigError('dataset.name', name, expected)
    return kind
  fields.check_value('dataset.name', name, Literal[tuple(SOURCES)])
  return fields.locate(SOURCES[name], 'dataset.name')


def build_source(config: ConfigLike, split: str) -> Source:
  """Opens the raw records of a split.

  Raises:
    ConfigError: the configuration or the split's name is not legal.
    MissingDataError: the data is not there; the message says how to get it.
    InvalidDataError: its layout is not usable.
  """
  complete = validate(config, split)
  return _find(complete.pop('name'))(split=split, **complete)


def default_num_threads() -> int:
  """Returns one thread for each core that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)
  return min(os.cpu_count() or 1, MAX_THREADS)


def build(
  config: ConfigLike,
  *,
  split: str,
  train: bool,
  seed: int,
  batch_size: int,
  host_index: int = 0,
  host_count: int = 1,
  num_threads: int | None = None,
  prefetch: int = DEFAULT_PREFETCH,
) -> 'Dataset':
  """Builds the data set of one split.

  Args:
    config: the `dataset` part of a run's configuration.
    split: name of the split.
    train: True for the infinite shuffled stream with augmentation and
      tolerance for bad records, False for one ordered pass.
    seed: decides order and augmentation.
    batch_size: rows of the GLOBAL batch, a multiple of host_count.
    host_index: number of this host.
    host_count: number of hosts.
    num_threads: reading threads; None for one per core, 0 reads in the caller.
    prefetch: batches read ahead.

  Raises:
    ConfigError: an argument or field is not legal.
    MissingDataError: the data is not there.
    InvalidDataError: its layout is not usable.
    TooManyBadRecordsError: more rows of a text file are bad than tolerated.
  """
  if num_threads is None:
    num_threads = default_num_threads()
  fields.check_value('seed', seed, source.Seed)
  fields.check_value('batch_size', batch_size, source.Size)
  fields.check_value('num_threads', num_threads, _Small)
  fields.check_value('prefetch', prefetch, _Positive)
  rows = local_rows(batch_size, host_index, host_count)
  records: Any = build_source(config, split)
  order: Order | LengthOrder
  if isinstance(records, TokenSource):
    buckets = records.info.length_buckets
    order = LengthOrder(records.lengths, buckets, batch_size, seed, train)
  else:
    order = Order(len(records), batch_size, seed, train)
  max_share = getattr(records, 'max_bad_share', 0.0) if train else 0.0
  return Dataset(
    records,
    _transform(records, train),
    order,
    rows,
    max_share,
    num_threads,
    prefetch,
  )


def _transform(records: Any, train: bool) -> Transform:
  """Returns the function from a raw value to an input."""
  if not hasattr(records, 'transform'):
    return lambda value, key: value
  if train and getattr(records, 'augment', True):
    return lambda value, key: records.transform(value, record_rng(*key))
  return lambda value, key: records.transform(value, None)


@dataclasses.dataclass(eq=False)
class Dataset:
  """Global batches of one split; made by `build`.

  Attributes:
    info: shapes, classes and size.
    steps_per_epoch: full batches in the split for training (at least 1), all
      batches with the padded last one for evaluation.
    rows: this host's rows of every global batch.
    block: rows that are read at once; `blocks_per_batch` of them are `rows`.
  """

  records: Source
  transform: Transform
  order: Order | LengthOrder
  rows: range
  max_bad_share: float
  num_threads: int
  prefetch: int

  def __post_init__(self) -> None:
    self.info: DatasetInfo = self.records.info
    self.steps_per_epoch = self.order.steps_per_epoch
    many_at_once = isinstance(self.records, VectorSource)
    limit = len(self.rows) if many_at_once else ROWS_PER_BLOCK
    self.block = min(len(self.rows), limit)
    self.blocks_per_batch = -(-len(self.rows) // self.block)
    # Rows of text are read, and found bad, before the first batch.
    bad_rows = getattr(self.records, 'bad_rows', ())
    self._bad_records = BadRecords(
      len(self.records) + len(bad_rows), self.max_bad_share
    )
    for row, bad in bad_rows:
      self._bad_records.add(bad, bad.where, row)

  @property
  def bad_records(self) -> dict[str, dict[str, Any]]:
    """{kind: {'count': n, 'first': [{'file', 'row', 'message'}, ...]}}."""
    return self._bad_records.summary()

  def places(self) -> set[str]:
    """Returns file and line of each record; see `source.places`."""
    return set(source.places(self.records))

  def batches(self, start_step: int = 0) -> Iterator[Batch]:
    """Yields this host's rows of every global batch from `start_step` on.

    Args:
      start_step: first global batch; reached at once, without replay.

    Returns:
      A generator of {input_key, 'label', 'mask', 'index'} with leading axis
      batch_size / host_count: infinite for training, one pass for evaluation
      with the last batch padded (mask 0, index -1). Rows of text also have
      'token_types' and 'length', and batches differ in their padded length.
      `close()` stops its threads, as does its end or garbage collection.

    Raises:
      ConfigError: start_step is not an integer of at least 0.
      TooManyBadRecordsError: while iterating, when the tolerance is exceeded.
    """
    if not isinstance(start_step, numbers.Integral) or start_step < 0:
      raise ConfigError('start_step', start_step, 'an integer of at least 0')
    per_batch, num_blocks = self.blocks_per_batch, None
    if not self.order.shuffle:
      num_blocks = max(0, self.steps_per_epoch - int(start_step)) * per_batch
    first = int(start_step) * per_batch
    return self._iterate(Reader(self, self._bad_records, first, num_blocks))

  def _iterate(self, reader: Reader) -> Iterator[Batch]:
    # Imported here so that validating a configuration stays cheap.
    import grain

    if not len(reader):
      return
    per_batch = self.blocks_per_batch
    ahead = max(self.prefetch * per_batch, self.num_threads)
    blocks = grain.MapDataset.source(reader).to_iter_dataset(
      grain.ReadOptions(
        num_threads=self.num_threads, prefetch_buffer_size=ahead
      )
    )
    if per_batch > 1:
      blocks = blocks.batch(per_batch, batch_fn=concatenate)
    with contextlib.closing(iter(blocks)) as batches:
      yield from batches
