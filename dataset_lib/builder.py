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

# Short names; a configuration may name any other class as module:Class.
SOURCES = {
  'parity': 'dataset_lib.synthetic:Parity',
  'digits': 'dataset_lib.synthetic:Digits',
  'folder': 'dataset_lib.image_folder:ImageFolder',
  'tfds': 'dataset_lib.records.tfds:TfdsImages',
  'records': 'dataset_lib.records.tfds:ImageRecords',
  'glue': 'dataset_lib.text_tasks:Glue',
  'probing': 'dataset_lib.text_tasks:Probing',
  'texts': 'dataset_lib.texts:Texts',
  'tags': 'dataset_lib.tagged_words:TaggedWords',
  'pretraining': 'dataset_lib.pretraining:Pretraining',
}

Batch = dict[str, Shaped[np.ndarray, '...']]  # leading axis: rows
RowShapes = dict[str, tuple[tuple[int, ...], str]]  # and dtypes

# Fields that determine how evaluation reads and prepares an input.
_PREPARATION = (
  'image_size', 'resize_small', 'tokenizer', 'max_length', 'length_buckets',
  'text', 'pair', 'label', 'source', 'kind', 'separator',
)  # fmt: skip
_MAX_THREADS = 32  # more threads are limited by the GIL


def validate(config: Any) -> dict[str, Any]:
  """Returns a configuration with its defaults; ConfigError if it is illegal."""
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
  place = SOURCES.get(name, name)
  kind = registry.locate(place, 'dataset.name', Source, expected)
  parameters = inspect.signature(kind).parameters
  if not dataclasses.is_dataclass(kind) or 'split' not in parameters:
    raise ConfigError('dataset.name', name, expected)
  return kind


def prepared_alike(config: ConfigLike, run: ConfigLike) -> dict[str, Any]:
  """Returns a data set that prepares inputs as that of a run, if not stated."""
  stated = dict(config.items())
  legal = inspect.signature(source_class(stated.get('name'))).parameters
  # A data set of images without the field has no central crop.
  values = {'resize_small': run.get('image_size'), **dict(run.items())}
  return {
    name: values[name] for name in _PREPARATION
    if name in legal and values.get(name) is not None
  } | stated  # fmt: skip


def preprocessing(config: ConfigLike) -> dict[str, Any]:
  """Returns how a legal configuration prepares inputs, as a `DatasetInfo`."""
  values = dict(config.items())
  return source_class(values['name']).prepared(values | {'tokenizer': ''})


def build_source(
  config: ConfigLike,
  split: str,
  run: DatasetInfo | None = None,
  is_checked: bool = False,
) -> Source:
  """Opens the raw records of a split, for a `run` of its inputs and classes.

  `is_checked`: the configuration was, by `validate` and `check_split`. Raises
  ConfigError, MissingDataError or InvalidDataError.
  """
  values = dict(config.items()) if is_checked else validate(config)
  if not is_checked:
    check_split(values, split)
  kind = source_class(values.pop('name'))
  opened = registry.build(kind, values, split=split)
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
    train: True for the infinite shuffled stream with augmentation and tolerance
      for bad records, False for one ordered pass.
    batch_size: rows of the GLOBAL batch, a multiple of host_count.
    num_threads: reading threads; None for one per core, 0 reads in the caller.
  """
  size, rest = divmod(batch_size, host_count)
  if rest:
    expected = f'a positive multiple of {host_count} hosts'
    raise ConfigError('batch_size', batch_size, expected)
  rows = range(host_index * size, (host_index + 1) * size)
  source = build_source(config, split, is_checked=is_checked)
  return Dataset(source, batch_size, seed, train, rows, num_threads, prefetch)


def chosen(
  source: Source, records: Int[np.ndarray, ' N'], batch_size: int, seed: int = 0
) -> 'Dataset':
  """Opens given records of a source; `seed` is for one that draws its rows."""
  rows = range(batch_size)
  return Dataset(source, batch_size, seed, False, rows, records=records)


def spread(
  source: Any, rows: int, batch_size: int = 64, seed: int = 0
) -> 'Dataset':
  """Opens at most `rows` evenly spaced records of a source; see `chosen`."""
  count = min(rows, len(source))
  records = np.arange(count, dtype=np.int64) * len(source) // max(count, 1)
  return chosen(source, records, max(1, min(batch_size, count)), seed)


def sketch(
  config: Any, split: str, classes: int, examples: int
) -> tuple[DatasetInfo, RowShapes]:
  """Describes a data set without its data, to compile for another machine.

  Generated data, and a source without a sketch, are opened. Rows of texts have
  the greatest length; `classes` is for a data set whose fields do not tell.
  """
  kind = source_class(config['name'])
  files = {'root', 'directory', 'data_dir', 'path'} & {*config}
  if not files or kind.sketch is Source.sketch:
    data = build(
      config, split=split, train=True, seed=0, batch_size=1, num_threads=0
    )
    return data.info, data.row_shapes()
  info, more = kind.sketch(config, classes, examples)
  rows: RowShapes = {
    info.input_key: (info.input_shape, info.input_dtype),
    'label': (info.label_shape, info.label_dtype),
  }
  return info, rows | more | {'mask': ((), 'float32'), 'index': ((), 'int32')}


class Dataset:
  """Global batches of one split, or of some `records`; made by `build`.

  Grain's threads read blocks of rows, so that its overhead is paid per block.
  """

  def __init__(
    self,
    source: Source,
    batch_size: int,
    seed: int,
    train: bool,
    rows: range,
    threads: int | None = None,
    prefetch: int = 2,
    records: Int[np.ndarray, ' N'] | None = None,
  ):
    self.source, self._rows, self._records = source, rows, records
    self.info = source.info
    count, lengths = len(source), source.lengths
    if records is not None:
      count = len(records)
      lengths = None if lengths is None else lengths[records]
    buckets = self.info.length_buckets
    self._order = Order(count, batch_size, seed, train, lengths, buckets)
    self._class_ids: Int[np.ndarray, ' C'] | None = None
    self.steps_per_epoch = self._order.steps_per_epoch
    self._block_rows = min(len(rows), source.block_rows or len(rows))
    self._per_batch = -(-len(rows) // self._block_rows)
    threads = default_num_threads() if threads is None else threads
    ahead = max(prefetch * self._per_batch, threads)
    self._reading = dict(num_threads=threads, prefetch_buffer_size=ahead)
    # Rows of text are read, and found bad, before the first batch.
    total = len(source) + len(source.bad_rows)
    max_share = source.max_bad_share if train else 0.0
    self._bad_records = bad_records.BadRecords(total, max_share, source.split)
    self._bad_records.count(source.bad_rows)

  @property
  def bad_records(self) -> dict[str, dict[str, Any]]:
    """{kind: {'count': n, 'first': [{'file', 'row', 'message'}, ...]}}."""
    return self._bad_records.summary()

  def label_as(self, run: DatasetInfo) -> None:
    """Makes batches have the labels of a run; see `contract.class_ids`."""
    ids = contract.class_ids(run, self.info)
    # -1, no label, reads the last one.
    self._class_ids = None if ids is None else np.append(ids, np.int32(-1))
    names = run.class_names or self.info.class_names
    self.info = dataclasses.replace(
      self.info, num_classes=run.num_classes, class_names=names
    )

  def row_shapes(self) -> RowShapes:
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

    Batches are {input_key, 'label', 'mask', 'index'}, and what the source adds,
    with leading axis batch_size / host_count: infinite for training, one pass
    for evaluation with the last batch padded (mask 0, index -1). Rows without a
    label have mask 0. 'label' is `[B]`, or `[B, max_labels]` padded with -1, or
    `[B, L]` of tags. Batches of texts differ in their padded length.
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
      none = label.dtype.type(-1)  # 0 * NaN would be NaN in a masked loss
      arrays |= {'label': np.where(np.isfinite(label), label, none)}
    batch = {**arrays, 'mask': mask, 'index': indices.astype(np.int32)}
    missing = len(rows) - len(indices)
    fill = {**self.source.padding, 'index': -1}
    for key, values in batch.items() if missing else ():
      widths = [(0, missing)] + [(0, 0)] * (values.ndim - 1)
      batch[key] = np.pad(values, widths, constant_values=fill.get(key, 0))
    return batch


def _concatenate(blocks: Sequence[Batch]) -> Batch:
  return {k: np.concatenate([b[k] for b in blocks]) for k in blocks[0]}
