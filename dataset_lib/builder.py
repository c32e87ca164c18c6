"""From a configuration to global batches, sharded over hosts and resumable.

`build` gives a Dataset whose `batches(start_step)` yields this host's rows of
every global batch from that step on. Grain runs the threads and prefetches;
order, augmentation and replacements are functions of (seed, epoch, index).
"""

import contextlib
import numbers
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from dataset_lib import (
  digits,
  fake,
  fake_text,
  fields,
  glue,
  graves,
  image_folder,
  image_ops,
  parity,
  pretraining,
  probing,
  source,
  tfds_source,
)
from dataset_lib.bad_records import BadRecords
from dataset_lib.errors import ConfigError
from dataset_lib.fields import ConfigLike
from dataset_lib.length_order import LengthOrder
from dataset_lib.order import Order, local_rows, record_rng
from dataset_lib.reader import (
  ROWS_PER_BLOCK,
  Batch,
  Blocks,
  LengthReader,
  Reader,
  Transform,
  concatenate,
)
from dataset_lib.source import DatasetInfo, Source, TokenSource, VectorSource

SOURCES: dict[str, ModuleType] = {
  'parity': parity,
  'digits': digits,
  'folder': image_folder,
  'tfds': tfds_source,
  'glue': glue,
  'probing': probing,
  'graves': graves,
  'fake_images': fake,
  'fake_text': fake_text,
  'pretraining': pretraining,
}

MAX_THREADS = 32  # beyond this Python's lock, not the cores, is the limit
DEFAULT_PREFETCH = 2


def validate(config: Any, split: Any = None) -> dict[str, Any]:
  """Checks a configuration without reading data or touching a device.

  Args:
    config: the `dataset` part of a run's configuration: a mapping or an
      ml_collections ConfigDict.
    split: name of a split, to be checked as well.

  Returns:
    The configuration completed with defaults.

  Raises:
    ConfigError: names the key, the given value and the legal range.
  """
  if not isinstance(config, ConfigLike):
    raise ConfigError('dataset', config, "a mapping with a field 'name'")
  given = dict(config.items())
  name = given.pop('name', None)
  fields.check_one_of('dataset.name', name, SOURCES)
  module = SOURCES[name]
  complete = fields.check_fields(given, module.FIELDS, 'dataset')
  if 'augment' in complete:
    image_ops.options_from(complete)
  if split is not None:
    fields.check_field('split', split, fields.text('the name of a split'))
    module.check_split(split)
  return {'name': name, **complete}


def build_source(config: ConfigLike, split: str) -> Source:
  """Random access to the raw records of a split.

  Raises:
    ConfigError: the configuration or the split's name is not legal.
    MissingDataError: the data is not there; the message says how to get it.
    InvalidDataError: its layout is not usable.
  """
  complete = validate(config, split)
  return SOURCES[complete['name']].build(complete, split)


def default_num_threads() -> int:
  """One thread for each core that this process may use."""
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
  """The data set of one split.

  Args:
    config: the `dataset` part of a run's configuration.
    split: name of the split.
    train: True for the infinite shuffled stream with augmentation and
      tolerance for bad records, False for one ordered pass.
    seed: the run's seed; decides order and augmentation.
    batch_size: rows of the GLOBAL batch, a multiple of host_count.
    host_index: which host this is.
    host_count: number of hosts.
    num_threads: reading threads; None for one per core, 0 to read in the
      calling thread.
    prefetch: batches read ahead.

  Raises:
    ConfigError: an argument or field is not legal.
    MissingDataError: the data is not there.
    InvalidDataError: its layout is not usable.
    TooManyBadRecordsError: more rows of a text file are bad than tolerated.
  """
  complete = validate(config, split)
  _check_count('seed', seed, 0, source.MAX_SEED)
  _check_count('batch_size', batch_size, 1, source.MAX_EXAMPLES)
  if num_threads is None:
    num_threads = default_num_threads()
  _check_count('num_threads', num_threads, 0, 1024)
  _check_count('prefetch', prefetch, 1, 1024)
  rows = local_rows(batch_size, host_index, host_count)
  records = SOURCES[complete['name']].build(complete, split)
  block = len(rows)
  if not isinstance(records, VectorSource):
    block = min(block, ROWS_PER_BLOCK)
  return Dataset(
    records,
    _transform(complete, train),
    _order(records, batch_size, seed, train),
    Blocks(batch_size, rows, block),
    max_bad_share=complete.get('max_bad_share', 0.0) if train else 0.0,
    num_threads=num_threads,
    prefetch=prefetch,
  )


def _check_count(key: str, value: Any, low: int, high: int) -> None:
  fields.check_field(key, value, fields.integer(low, high))


def _order(
  records: Source, batch_size: int, seed: int, train: bool
) -> Order | LengthOrder:
  """Which record stands where; rows of tokens are grouped by length."""
  if not isinstance(records, TokenSource):
    return Order(len(records), seed, shuffle=train)
  buckets = records.info.length_buckets
  return LengthOrder(records.lengths, buckets, batch_size, seed, train)


def _transform(config: dict[str, Any], train: bool) -> Transform:
  """What happens to a raw input between the source and the batch."""
  if 'augment' not in config:
    return lambda value, key: value
  options = image_ops.options_from(config)
  if train and options.augment:
    return lambda value, key: image_ops.training_image(
      value, record_rng(*key), options
    )
  return lambda value, key: image_ops.evaluation_image(value, options)


class Dataset:
  """Global batches of one split; made by `build`.

  Attributes:
    info: shapes, classes and size.
    steps_per_epoch: full batches in the split for training (at least 1), all
      batches with the padded last one for evaluation.
  """

  def __init__(
    self,
    records: Source,
    transform: Transform,
    order: Order | LengthOrder,
    blocks: Blocks,
    max_bad_share: float,
    num_threads: int,
    prefetch: int,
  ):
    self.info: DatasetInfo = records.info
    batches, rest = divmod(len(records), blocks.batch_size)
    if order.shuffle:
      self.steps_per_epoch = max(1, batches)
    else:
      self.steps_per_epoch = batches + bool(rest)
    self._records: Any = records
    self._transform = transform
    self._order = order
    self._blocks = blocks
    self._num_threads = num_threads
    self._prefetch = prefetch
    # Rows of text are read, and found bad, before the first batch.
    bad_rows = getattr(records, 'bad_rows', ())
    self._bad_records = BadRecords(len(records) + len(bad_rows), max_bad_share)
    for row, bad in bad_rows:
      self._bad_records.add(bad, bad.where, row)

  @property
  def bad_records(self) -> dict[str, dict[str, Any]]:
    """{kind: {'count': n, 'first': [{'file', 'row', 'message'}, ...]}}."""
    return self._bad_records.summary()

  def places(self) -> set[str]:
    """Where the records lie; empty for a source of computed ones."""
    return set(source.places(self._records))

  def batches(self, start_step: int = 0) -> Iterator[Batch]:
    """This host's rows of every global batch from `start_step` on.

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
    return self._iterate(self._reader(int(start_step)))

  def _reader(self, start_step: int) -> Reader | LengthReader:
    num_steps = None
    if not self._order.shuffle:
      num_steps = max(0, self.steps_per_epoch - start_step)
    if isinstance(self._order, LengthOrder):
      rows = self._blocks.rows
      return LengthReader(
        self._records, self._order, rows, start_step, num_steps
      )
    per_batch = self._blocks.per_batch
    return Reader(
      self._records,
      self._transform,
      self._order,
      self._blocks,
      self._bad_records,
      first_block=start_step * per_batch,
      num_blocks=None if num_steps is None else num_steps * per_batch,
    )

  def _iterate(self, reader: Reader | LengthReader) -> Iterator[Batch]:
    # Imported here so that validating a configuration stays cheap.
    import grain

    if not len(reader):
      return
    per_batch = self._blocks.per_batch
    ahead = max(self._prefetch * per_batch, self._num_threads)
    blocks = grain.MapDataset.source(reader).to_iter_dataset(
      grain.ReadOptions(
        num_threads=self._num_threads, prefetch_buffer_size=ahead
      )
    )
    if per_batch > 1:
      blocks = blocks.batch(per_batch, batch_fn=concatenate)
    with contextlib.closing(iter(blocks)) as batches:
      yield from batches
