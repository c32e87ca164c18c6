"""Data sets that TFDS prepared, read at random without TensorFlow.

ArrayRecord files have an index. The record lengths of TFRecord files are
scanned once, on opening; the offsets are kept in memory (8 bytes a record).
"""

import bisect
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
import struct
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Predicate
from jaxtyping import Int64

from dataset_lib import fields, source
from dataset_lib.errors import (
  BadRecord,
  ConfigError,
  InvalidDataError,
  MissingDataError,
)
from dataset_lib.image_ops import ImageOptions

_INFO_FILE, _FEATURES_FILE = 'dataset_info.json', 'features.json'
# name, name/config, name:1.2.3. No 'namespace:name': TFDS would fetch those
# from the network and run their code.
_NAME = re.compile(r'([a-z]\w*(/\w[\w.-]*)?(:\d+\.\d+\.\d+)?)?')
_CLASS_KEYS = ('type', 'pythonClassName', 'python_class_name')
# Names without a dot import nothing.
_OWN_CLASS = re.compile(r'[^.]*|tensorflow_datasets\..*', re.DOTALL)
_HEADER = struct.Struct('<QI')  # of TFRecord: length, checksum of the length
_FOOTER_BYTES = 4  # checksum of the data
_FORMATS = ('array_record', 'tfrecord')

BuilderName = Annotated[
  str, Predicate(_NAME.fullmatch), "a TFDS name such as 'cifar10'"
]
DataDir = Annotated[str, "a folder, or '' for ~/tensorflow_datasets"]


@dataclasses.dataclass(kw_only=True, eq=False)
class TfdsImages(ImageOptions):
  """Encoded images of one split of a prepared builder, and their classes."""

  split: Annotated[
    str, Predicate(source.parts), "a split or a part, like 'train[:90%]'"
  ]
  builder: BuilderName = ''
  data_dir: DataDir = ''
  max_bad_share: source.BadShare = source.DEFAULT_BAD_SHARE

  def __post_init__(self) -> None:
    builder = prepared_builder(self.builder, self.data_dir, "dataset 'tfds'")
    self._keys = keys = builder.info.supervised_keys or ()
    features = [builder.info.features[key] for key in keys]
    kinds = [type(feature).__name__ for feature in features]
    if kinds != ['Image', 'ClassLabel']:
      found = ' to '.join(kinds) or 'no input to a label'
      name = builder.info.full_name
      raise InvalidDataError(f'{name} maps {found}, not Image to ClassLabel')
    self._examples = Examples(builder, self.split, keys)
    self.where, label = self._examples.where, features[1]
    names = label.names or ()
    self.info = self.image_info(label.num_classes, names, len(self._examples))

  def __len__(self) -> int:
    return self.info.num_examples

  def record(self, index: int) -> dict[str, Any]:
    """Returns {'image': encoded bytes, 'label': int}; or raises BadRecord."""
    example = self._examples[index]
    image, label = (example[key] for key in self._keys)
    return {'image': image, 'label': label}


class Examples:
  """Features `keys` of the records of one split, by index; images encoded."""

  def __init__(self, builder: Any, split: str, keys: Sequence[str]):
    import tensorflow_datasets as tfds

    info, name = builder.info, builder.info.full_name
    features = {key: info.features[key] for key in keys}
    encoded = {
      key: tfds.decode.SkipDecoding()
      for key, feature in features.items()
      if isinstance(feature, tfds.features.Image)
    }
    self._parse = functools.partial(
      tfds.features.FeaturesDict(features).deserialize_example_np,
      decoders=encoded,
    )
    try:
      self._shards = shards = list(info.splits[split].file_instructions)
    except (KeyError, ValueError) as error:
      raise MissingDataError(
        f'{name} has no split {split!r}; it has {", ".join(info.splits)} and '
        f'parts of them, like train[:90%] ({error})'
      ) from error
    kind = info.file_format.value
    if kind not in _FORMATS:
      raise InvalidDataError(
        f'{name} is stored as {kind}; expected one of {", ".join(_FORMATS)}: '
        'prepare it again with --file_format=array_record'
      )
    self._starts = [0, *itertools.accumulate(shard.take for shard in shards)]
    if not len(self):
      raise InvalidDataError(f'{name}: the split is empty')
    self.files = sorted({shard.filename for shard in shards})
    for file in self.files:
      if not os.path.exists(file):
        raise MissingDataError(f'missing shard {file}; copy it again')
    if kind == 'tfrecord':
      self._offsets = [
        record_offsets(shard.filename, shard.examples_in_shard)
        for shard in shards
      ]
      self._read: Any = self._read_tfrecord
    else:
      from array_record.python import array_record_data_source as array_record

      self._read = array_record.ArrayRecordDataSource(shards).__getitem__

  def __len__(self) -> int:
    return self._starts[-1]

  def __getitem__(self, index: int) -> dict[str, Any]:
    """Returns the features of a record; BadRecord if it is damaged."""
    from google.protobuf import message

    try:
      data = self._read(index)
    except (OSError, RuntimeError, ValueError, IndexError) as error:
      raise BadRecord('unreadable', self.where(index), str(error)) from error
    try:
      return self._parse(data)
    except (message.DecodeError, KeyError, ValueError) as error:
      raise BadRecord('unparsable', self.where(index), str(error)) from error

  def where(self, index: int) -> str:
    """Returns the file of a record and its row there."""
    number, row = self._locate(index)
    return f'{self._shards[number].filename}, record {row}'

  def _locate(self, index: int) -> tuple[int, int]:
    """Returns (number of the shard, row in its file) of a record."""
    number = bisect.bisect_right(self._starts, index) - 1
    return number, index - self._starts[number] + self._shards[number].skip

  def _read_tfrecord(self, index: int) -> bytes:
    number, row = self._locate(index)
    start, end = self._offsets[number][row : row + 2]
    size = int(end - start) - _HEADER.size - _FOOTER_BYTES
    # Opened per read: a data set may have more shards than a process may
    # have open files, and a file object's position is not thread-safe.
    with open(self._shards[number].filename, 'rb', buffering=0) as file:
      file.seek(int(start) + _HEADER.size)
      data = file.read(size)
    if len(data) != size:
      raise OSError(f'cut short: expected {size} bytes, got {len(data)}')
    return data


def record_offsets(filename: str, num_records: int) -> Int64[np.ndarray, ' M']:
  """Returns the offsets of a TFRecord file's records, and at the end its size.

  Raises InvalidDataError unless it holds exactly `num_records` records.
  """
  size, offsets = os.path.getsize(filename), [0]
  with open(filename, 'rb') as file:
    while len(offsets) <= num_records and offsets[-1] + _HEADER.size <= size:
      file.seek(offsets[-1])
      length, _ = _HEADER.unpack(file.read(_HEADER.size))
      offsets.append(offsets[-1] + _HEADER.size + length + _FOOTER_BYTES)
  if len(offsets) <= num_records or offsets[-1] != size:
    raise InvalidDataError(
      f'{filename} does not hold exactly {num_records} records in its {size} '
      'bytes; it is damaged or cut short, copy or prepare it again'
    )
  return np.array(offsets, np.int64)


def _refuse_foreign_code(file: pathlib.Path) -> None:
  """Raises InvalidDataError for a features.json that names a foreign class.

  TFDS imports the module of any class named there, also in JSON within strings,
  so a data set could run code of its choice.
  """

  def check(pairs: list[tuple[str, Any]]) -> None:
    for key, value in pairs:
      for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and text.lstrip().startswith(('{', '[')):
          json.loads(text, object_pairs_hook=check)
        elif key in _CLASS_KEYS and not _OWN_CLASS.fullmatch(str(text)):
          expected = 'only features of tensorflow_datasets are read'
          raise InvalidDataError(f'{file} would import {text}; {expected}')

  try:
    json.loads(file.read_text(), object_pairs_hook=check)
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise InvalidDataError(f'{file} is damaged: {error}') from error


def prepared_builder(name: str, data_dir: str, user: str) -> Any:
  """Returns the TFDS builder of a data set that is on disk.

  `data_dir` is that of TFDS, '' for its default, or the folder of one version.
  `user`: name used in the error if TFDS is not installed.
  """
  try:
    import tensorflow_datasets as tfds
  except ImportError as error:
    raise MissingDataError(
      f'{user} needs tensorflow-datasets: pip install '
      "'adaptive-computation[tfds]'"
    ) from error
  folder = pathlib.Path(data_dir or tfds.core.constants.DATA_DIR).expanduser()
  if data_dir and (folder / _INFO_FILE).is_file():
    _refuse_foreign_code(folder / _FEATURES_FILE)
    return tfds.builder_from_directory(folder)
  if not name:
    raise MissingDataError(
      f'{folder} holds no {_INFO_FILE}: give dataset.builder a name, or '
      'dataset.data_dir the folder of one prepared version'
    )
  fields.check_value('dataset.builder', name, BuilderName)
  for file in (folder / re.split('[/:]', name)[0]).rglob(_FEATURES_FILE):
    _refuse_foreign_code(file)
  try:
    builder = tfds.builder(name, data_dir=folder)
  except tfds.core.DatasetNotFoundError as error:
    expected = f'a TFDS data set, or one prepared in {folder}'
    raise ConfigError('dataset.builder', name, expected) from error
  if not (pathlib.Path(builder.data_dir) / _INFO_FILE).is_file():
    raise MissingDataError(
      f'{name} is not prepared in {folder}; run\n'
      f'  tfds build {name} --data_dir={folder} --file_format=array_record'
    )
  return builder
