"""From a configuration to global batches, sharded over hosts and resumable."""

import os
import typing
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval

from dataset_lib import fields, source
from dataset_lib.errors import ConfigError
from dataset_lib.fields import ConfigLike
from dataset_lib.order import LengthOrder, Order
from dataset_lib.reader import Dataset
from dataset_lib.source import Source

# Short names of data sets; a configuration may name any other as module:Class.
SOURCES = {
  'parity': 'dataset_lib.synthetic:Parity',
  'digits': 'dataset_lib.synthetic:Digits',
  'folder': 'dataset_lib.image_folder:ImageFolder',
  'tfds': 'dataset_lib.tfds:TfdsImages',
  'glue': 'dataset_lib.text_tasks:Glue',
  'probing': 'dataset_lib.text_tasks:Probing',
  'pretraining': 'dataset_lib.pretraining:Pretraining',
}

MAX_THREADS = 32  # beyond this Python's lock, not the cores, is the limit
DEFAULT_PREFETCH = 2


def validate(config: Any, split: Any = None) -> dict[str, Any]:
  """Returns a configuration completed with defaults, without reading data.

  Raises:
    ConfigError: a field, or the split if one is given, is not legal.
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
  affinity = getattr(os, 'sched_getaffinity', None)
  cores = len(affinity(0)) if affinity else os.cpu_count() or 1
  return min(cores, MAX_THREADS)


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
) -> Dataset:
  """Builds the data set of one split.

  Args:
    train: True for the infinite shuffled stream with augmentation and
      tolerance for bad records, False for one ordered pass.
    seed: decides order and augmentation.
    batch_size: rows of the GLOBAL batch, a multiple of host_count.
    num_threads: reading threads; None for one per core, 0 reads in the caller.
    prefetch: batches read ahead.

  Raises:
    ConfigError: an argument or field is not legal.
    MissingDataError: the data is not there.
    InvalidDataError: its layout is not usable.
    TooManyBadRecordsError: more rows of a text file are bad than tolerated.
  """
  threads = default_num_threads() if num_threads is None else num_threads
  for name, value, legal in (
    ('seed', seed, source.Seed),
    ('batch_size', batch_size, source.Size),
    ('num_threads', threads, Annotated[int, Interval(ge=0, le=1024)]),
    ('prefetch', prefetch, Annotated[int, Interval(ge=1, le=1024)]),
    ('host_count', host_count, Annotated[int, Ge(1)]),
    (
      'host_index',
      host_index,
      Annotated[int, Interval(ge=0, le=host_count - 1)],
    ),
  ):
    fields.check_value(name, value, legal)
  if batch_size % host_count:
    raise ConfigError(
      'batch_size', batch_size, f'a positive multiple of {host_count} hosts'
    )
  size = batch_size // host_count
  rows = range(host_index * size, (host_index + 1) * size)
  records: Any = build_source(config, split)
  buckets = records.info.length_buckets
  if buckets:
    order: Order = LengthOrder(
      records.lengths, buckets, batch_size, seed, train
    )
  else:
    order = Order(len(records), batch_size, seed, train)
  return Dataset(records, order, rows, train, threads, prefetch)
