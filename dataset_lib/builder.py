"""From a configuration to global batches, sharded over hosts and resumable."""

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Generator, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Int, Shaped

from core import fields, machine, registry
from core.errors import ConfigError
from core.fields import ConfigLike
from dataset_lib import bad_records, contract
from dataset_lib.order import Order
from dataset_lib.source import DatasetInfo, Source

# Short names of data sets; a configuration may name any other as module:Class.
SOURCES = {
  'parity': 'dataset_lib.synthetic:Parity',
  'digits': 'dataset_lib.synthetic:Digits',
  'folder': 'dataset_lib.image_folder:ImageFolder',
  'tfds': 'dataset_lib.records.tfds:TfdsImages',
  'records': 'dataset_lib.records.tfds:ImageRecords',
  'glue': 'dataset_lib.text_tasks:Glue',
  'probing': 'dataset_lib.text_tasks:Probing',
  'tags': 'dataset_lib.tagged_words:TaggedWords',
  'pretraining': 'dataset_lib.pretraining:Pretraining',
}

Batch = dict[str, Shaped[np.ndarray, '...']]  # leading axis: rows

# Fields that determine how evaluation prepares an input.
_PREPARATION = (
  'image_size', 'resize_small', 'tokenizer', 'max_length', 'length_buckets'
)  # fmt: skip
_MAX_THREADS = 32  # more threads are limited by the GIL


def validate(config: Any) -> dict[str, Any]:
  """Returns a configuration completed with defaults, without reading data.

  Raises ConfigError if a field is not legal.
  """
  if not isinstance(config, ConfigLike):
    raise ConfigError('dataset', config, "a mapping with a field 'name'")
  values = dict(config.items())
  name = values.pop('name', None)
  kind = source_class(name)
  complete = fields.check(kind, values, 'dataset', without=('split',))
  kind.check_fields(complete)
  return {'name': str(name), **complete}


def check_split(config: ConfigLike, split: Any, field: str = 'split') -> None:
  """Raises ConfigError for a field if the data cannot have the split."""
  legal = fields.hints(source_class(config['name']))['split']
  fields.check_value(field, split, legal)


def source_class(name: Any) -> Any:
  """Returns the class of a data set by its name."""
  if not (isinstance(name, str) and ':' in name):
    fields.check_value('dataset.name', name, Literal[tuple(SOURCES)])
  expected = "'package.module:Name' of a Source with a field split"
  kind = registry.locate(
    SOURCES.get(name, name), 'dataset.name', Source, expected
  )
  if not (
    dataclasses.is_dataclass(kind)
    and 'split' in {field.name for field in dataclasses.fields(kind)}
  ):
    raise ConfigError('dataset.name', name, expected)
  return kind


def prepared_alike(config: ConfigLike, run: ConfigLike) -> dict[str, Any]:
  """Returns a data set that prepares inputs as a run does, unless it says how.

  `run` is the complete configuration of the run's data set.
  """
  given, run = dict(config.items()), dict(run.items())
  legal = inspect.signature(source_class(given.get('name'))).parameters
  # A data set of images without the field has no central crop.
  known = {'resize_small': run.get('image_size')} | run
  return {
    name: known[name] for name in _PREPARATION
    if name in legal and known.get(name) is not None
  } | given  # fmt: skip


def preprocessing(config: ConfigLike) -> dict[str, Any]:
  """Returns how a legal configuration prepares inputs, as a `DatasetInfo`."""
  values = dict(config.items())
  # The tokenizer is that of a file.
  kind, no_file = source_class(values['name']), {'tokenizer': ''}
  return kind.prepared(values | no_file)


def build_source(
  config: ConfigLike,
  split: str,
  run: DatasetInfo | None = None,
  is_checked: bool = False,
) -> Source:
  """Opens the raw records of a split, for a `run` of its inputs and classes.

  `is_checked`: by `validate` and `check_split`, as those of a run are. Raises
  ConfigError, MissingDataError if the data is not there, or InvalidDataError if
  its layout is not usable.
  """
  given = dict(config.items()) if is_checked else validate(config)
  if not is_checked:
    check_split(given, split)
  opened = source_class(given.pop('name'))(split=split, **given)
  if run is not None:
    contract.check_inputs(run, opened.info)
    contract.check(run, opened.info, contract.LABELS, 'dataset')
  return opened


def default_num_threads() -> int:
  """Returns one thread for each core that this process may use."""
  return min(machine.cores(), _MAX_THREADS)


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
  prefetch: int = 2,
  is_checked: bool = False,
) -> 'Dataset':
  """Builds the data set of one split; raises the errors of `build_source`.

  Args:
    train: True for the infinite shuffled stream with augmentation by
      `seed` and tolerance for bad records, False for one ordered pass.
    batch_size: rows of the GLOBAL batch, a multiple of host_count.
    num_threads: reading threads; None for one per core, 0 reads in the caller.
    is_checked: see `build_source`.
  """
  size, rest = divmod(batch_size, host_count)
  if rest:
    expected = f'a positive multiple of {host_count} hosts'
    raise ConfigError('batch_size', batch_size, expected)
  rows = range(host_index * size, (host_index + 1) * size)
  source = build_source(config, split, is_checked=is_checked)
  threads = default_num_threads() if num_threads is None else num_threads
  return Dataset(source, batch_size, seed, train, rows, threads, prefetch)


def chosen(
  source: Source, records: Int[np.ndarray, ' N'], batch_size: int, seed: int = 0
) -> 'Dataset':
  """Opens given records of a source; `seed` is for one that draws its rows."""
  reading = range(batch_size), default_num_threads(), 2
  return Dataset(source, batch_size, seed, False, *reading, records)


def spread(
  source: Any, rows: int, batch_size: int = 64, seed: int = 0
) -> 'Dataset':
  """Opens at most `rows` records from all parts of a source; see `chosen`.

  The first ones are not representative: a folder of images is sorted by class.
  A batch has no more rows than there are.
  """
  total = len(source)
  count = min(rows, total)
  records = np.arange(count, dtype=np.int64) * total // max(count, 1)
  return chosen(source, records, max(1, min(batch_size, count)), seed)


class Dataset:
  """Global batches of one split, or of given records; made by `build`.

  For `steps_per_epoch` see `Order`. Grain's threads read blocks rather than
  single rows, so that its overhead is paid per block.
  """

  def __init__(
    self,
    source: Source,
    batch_size: int,
    seed: int,
    train: bool,
    rows: range,
    threads: int,
    prefetch: int,
    records: Int[np.ndarray, ' N'] | None = None,
  ):
    self.source, self._rows, self._records = source, rows, records
    self.info = source.info
    count = len(source) if records is None else len(records)
    lengths = source.lengths
    lengths = (
      lengths if records is None or lengths is None else lengths[records]
    )
    buckets = self.info.length_buckets
    self._order = Order(count, batch_size, seed, train, lengths, buckets)
    self._class_ids: Int[np.ndarray, ' C'] | None = None
    self.steps_per_epoch = self._order.steps_per_epoch
    self._block_rows = min(len(rows), source.block_rows or len(rows))
    self._per_batch = -(-len(rows) // self._block_rows)
    ahead = max(prefetch * self._per_batch, threads)
    self._reading = dict(num_threads=threads, prefetch_buffer_size=ahead)
    # Rows of text are read, and found bad, before the first batch.
    total = len(source) + len(source.bad_rows)
    max_share = source.max_bad_share if train else 0.0
    self._bad_records = bad_records.BadRecords(total, max_share)
    for row, bad in source.bad_rows:
      self._bad_records.count(bad, bad.where, row)

  @property
  def bad_records(self) -> dict[str, dict[str, Any]]:
    """{kind: {'count': n, 'first': [{'file', 'row', 'message'}, ...]}}."""
    return self._bad_records.summary()

  def label_as(self, run: DatasetInfo) -> None:
    """Makes batches have the labels of a run; see `contract.class_ids`."""
    ids, classes = contract.class_ids(run, self.info), run.num_classes
    # -1, no label, reads the last one.
    self._class_ids = None if ids is None else np.append(ids, np.int32(-1))
    names = run.class_names or self.info.class_names
    self.info = dataclasses.replace(
      self.info, num_classes=classes, class_names=names
    )

  def row_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns shape and dtype of a row of each array, of the longest rows."""
    with contextlib.closing(self.batches()) as batches:
      rows = {k: (v.shape[1:], str(v.dtype)) for k, v in next(batches).items()}
    # Rows padded to the length of the batch.
    padded, longest = rows[self.info.input_key][0], self.info.input_shape
    return {
      name: (longest if shape == padded else shape, dtype)
      for name, (shape, dtype) in rows.items()
    }

  def batches(self, start_step: int = 0) -> Generator[Batch, None, None]:
    """Yields this host's rows of every global batch from `start_step` on.

    Any step is reached at once, without replay. Batches are {input_key,
    'label', 'mask', 'index'} with leading axis batch_size / host_count:
    infinite for training, one pass for evaluation with the last batch padded
    (mask 0, index -1). Rows without a label have mask 0, too. 'label' is `[B]`,
    or `[B, max_labels]` padded with -1 where `info.max_labels` > 0, or `[B, L]`
    of tags. Rows of text also have 'token_types' and 'length', and batches
    differ in their padded length.
    `close()` stops the threads, as do exhaustion and garbage collection. Raises
    TooManyBadRecordsError.
    """
    # Imported here so that validating a configuration stays cheap.
    import grain

    first = int(start_step) * self._per_batch
    stop = self.steps_per_epoch * self._per_batch
    stop = sys.maxsize if self._order.shuffle else stop
    if first >= stop:
      return
    blocks = grain.MapDataset.range(first, stop).map(self._block)
    stream = blocks.to_iter_dataset(grain.ReadOptions(**self._reading))
    if self._per_batch > 1:
      stream = stream.batch(self._per_batch, batch_fn=_concatenate)
    with contextlib.closing(iter(stream)) as batches:
      yield from batches

  def _block(self, number: int) -> Batch:
    """Returns block `number`; block 0 is the first of step 0."""
    step, part = divmod(int(number), self._per_batch)
    rows = self._rows[part * self._block_rows :][: self._block_rows]
    places = self._order.batch(step, rows)
    if self._records is not None:
      places = places._replace(indices=self._records[places.indices])
    indices, arrays = self.source.read(
      places, self._order.seed, self._order.shuffle, self._bad_records.count
    )
    if self._class_ids is not None:
      arrays = arrays | {'label': self._class_ids[arrays['label']]}
    mask = np.ones(len(indices), np.float32)
    if 'label' in arrays:  # rows without one count as little as padding
      label = arrays['label']
      mask = self.info.labelled(label)
      # 0 * NaN would be NaN in a masked loss.
      arrays |= {
        'label': np.where(np.isfinite(label), label, label.dtype.type(-1))
      }
    batch = {**arrays, 'mask': mask, 'index': indices.astype(np.int32)}
    missing = len(rows) - len(indices)
    fill = {**self.source.padding, 'index': -1}
    for key, values in batch.items() if missing else ():
      widths = [(0, missing)] + [(0, 0)] * (values.ndim - 1)
      batch[key] = np.pad(values, widths, constant_values=fill.get(key, 0))
    return batch


def _concatenate(blocks: Sequence[Batch]) -> Batch:
  return {
    key: np.concatenate([block[key] for block in blocks]) for key in blocks[0]
  }
