"""Any prepared TFDS image classification data set, without TensorFlow.

ImageNet (imagenet2012), CIFAR (cifar10, cifar100), pets (oxford_iiit_pet),
Caltech (caltech101) and every other with an image and a class label, by name
or from a directory that a builder prepared. ArrayRecord and TFRecord files are
both read at random; only the stored image bytes leave the record, OpenCV
decodes them. Splits may be parts, like 'train[:90%]'.
"""

import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dataset_lib import fields, image_ops, source
from dataset_lib.errors import (
  BadRecord,
  ConfigError,
  InvalidDataError,
  MissingDataError,
)
from dataset_lib.record_files import (
  ArrayRecordFiles,
  RecordFiles,
  TFRecordFiles,
)

# train, train[:90%], train[10%:]+validation
_PART = r'\w+(\[(-?\d+%?)?:(-?\d+%?)?\])?'
_SPLIT = re.compile(rf'{_PART}(\+{_PART})*')
_INFO_FILE, _FEATURES_FILE = 'dataset_info.json', 'features.json'
_FILES: dict[str, Callable[[list[Any]], RecordFiles]] = {
  'array_record': ArrayRecordFiles,
  'tfrecord': TFRecordFiles,
}
# name, name/config, name:1.2.3. No 'namespace:name': TFDS would fetch those
# from the network and run their code.
_NAME = re.compile(r'[a-z]\w*(/\w[\w.-]*)?(:\d+\.\d+\.\d+)?')
_CLASS_KEYS = ('type', 'pythonClassName', 'python_class_name')

FIELDS = {
  'builder': fields.Field(
    "a TFDS name such as 'cifar10'",
    lambda value: (
      isinstance(value, str) and bool(_NAME.fullmatch(value or 'x'))
    ),
    default='',
  ),
  'data_dir': fields.text("a folder, or '' for ~/tensorflow_datasets", ''),
  **image_ops.FIELDS,
  'max_bad_share': fields.real(0.0, 0.5, default=source.DEFAULT_BAD_SHARE),
}


class TfdsSource:
  """Encoded images of one split of a prepared builder.

  Args:
    builder: a tfds builder whose data is prepared.
    split: name or part of a split.
    image_size: side of the batches' images, for `info`.
  """

  def __init__(self, builder: Any, split: str, image_size: int):
    import tensorflow_datasets as tfds

    image_key, label_key = _keys(builder)
    features = builder.info.features
    self._image_key, self._label_key = image_key, label_key
    # Only these two are parsed, whatever else the records hold.
    self._features = tfds.features.FeaturesDict(
      {key: features[key] for key in (image_key, label_key)}
    )
    self._decoders = {image_key: tfds.decode.SkipDecoding()}
    instructions = file_instructions(builder, split)
    self._records = open_records(builder, instructions)
    label = features[label_key]
    self.info = source.DatasetInfo(
      input_key='image',
      input_shape=(image_size, image_size, 3),
      input_dtype='uint8',
      num_classes=label.num_classes,
      class_names=tuple(label.names or ()),
      num_examples=sum(part.take for part in instructions),
    )

  def __len__(self) -> int:
    return self.info.num_examples

  def record(self, index: int) -> dict[str, Any]:
    """{'image': encoded bytes, 'label': int}; BadRecord if unreadable."""
    from google.protobuf import message

    serialized = self._records[index]
    try:
      example = self._features.deserialize_example_np(
        serialized, decoders=self._decoders
      )
      image, label = example[self._image_key], example[self._label_key]
    except (message.DecodeError, KeyError, ValueError) as error:
      raise BadRecord('unparsable', self.where(index), str(error)) from error
    return {'image': image, 'label': label}

  def where(self, index: int) -> str:
    """Shard of the record and its row there."""
    return self._records.where(index)


def _keys(builder: Any) -> tuple[str, str]:
  """Names of the image and the label feature."""
  keys = builder.info.supervised_keys
  name = builder.info.full_name
  if not keys or len(keys) != 2:
    raise InvalidDataError(f'{name} has no pair of input and label')
  image, label = (builder.info.features[key] for key in keys)
  kinds = type(image).__name__, type(label).__name__
  if kinds != ('Image', 'ClassLabel'):
    raise InvalidDataError(
      f'{name} maps {kinds[0]} to {kinds[1]}; expected Image to ClassLabel'
    )
  return keys


def file_instructions(builder: Any, split: str) -> list[Any]:
  """Parts of shards that make up the split."""
  splits = builder.info.splits
  try:
    return list(splits[split].file_instructions)
  except (KeyError, ValueError) as error:
    raise MissingDataError(
      f'{builder.info.full_name} has no split {split!r}; it has '
      f'{", ".join(splits)} and parts of them, like train[:90%] ({error})'
    ) from error


def open_records(builder: Any, instructions: list[Any]) -> RecordFiles:
  """Random access to the records of those parts."""
  kind = builder.info.file_format.value
  if kind not in _FILES:
    raise InvalidDataError(
      f'{builder.info.full_name} is stored as {kind}; expected one of '
      f'{", ".join(_FILES)}: prepare it again with --file_format=array_record'
    )
  if not sum(part.take for part in instructions):
    raise InvalidDataError(f'{builder.info.full_name}: the split is empty')
  return _FILES[kind](instructions)


def _class_names(value: Any) -> Iterator[str]:
  """Names of Python classes in a decoded features.json, JSON in it included."""
  if isinstance(value, str) and value.lstrip()[:1] in ('{', '['):
    value = json.loads(value)
  if isinstance(value, list):
    for item in value:
      yield from _class_names(item)
  if isinstance(value, dict):
    for key, item in value.items():
      if key in _CLASS_KEYS and isinstance(item, str):
        yield item
      yield from _class_names(item)


def refuse_foreign_code(file: pathlib.Path) -> None:
  """Refuses a features.json that names a class from outside of TFDS.

  TFDS imports the module of any class named there, so a data set could run
  code of its choice.

  Raises:
    InvalidDataError: it does, or it is no JSON.
  """
  try:
    names = set(_class_names(json.loads(file.read_text())))
  except ValueError as error:
    raise InvalidDataError(f'{file} is damaged: {error}') from error
  # Names without a dot import nothing.
  foreign = sorted(
    name
    for name in names
    if '.' in name and not name.startswith('tensorflow_datasets.')
  )
  if foreign:
    raise InvalidDataError(
      f'{file} would import {", ".join(foreign)}; only features of '
      'tensorflow_datasets are read'
    )


def prepared_builder(name: str, data_dir: str) -> Any:
  """The builder of a data set that is on disk.

  Raises:
    MissingDataError: it is not; the message has the command to prepare it.
  """
  import tensorflow_datasets as tfds

  folder = pathlib.Path(data_dir or tfds.core.constants.DATA_DIR).expanduser()
  if data_dir and (folder / _INFO_FILE).is_file():
    refuse_foreign_code(folder / _FEATURES_FILE)
    return tfds.builder_from_directory(folder)
  if not name:
    raise MissingDataError(
      f'{folder} holds no {_INFO_FILE}: give dataset.builder a name, or '
      'dataset.data_dir the folder of one prepared version'
    )
  for file in (folder / re.split('[/:]', name)[0]).rglob(_FEATURES_FILE):
    refuse_foreign_code(file)
  try:
    builder = tfds.builder(name, data_dir=folder)
  except tfds.core.DatasetNotFoundError as error:
    raise ConfigError(
      'dataset.builder', name, f'a TFDS data set, or one prepared in {folder}'
    ) from error
  if not (pathlib.Path(builder.data_dir) / _INFO_FILE).is_file():
    raise MissingDataError(
      f'{name} is not prepared in {folder}; run\n'
      f'  tfds build {name} --data_dir={folder} --file_format=array_record'
    )
  return builder


def check_split(split: str) -> None:
  """Raises ConfigError unless the split reads like 'train[:90%]'."""
  if not _SPLIT.fullmatch(split):
    raise ConfigError('split', split, "a split or a part, like 'train[:90%]'")


def build(config: Mapping[str, Any], split: str) -> TfdsSource:
  """The source of one split; `config` has every field of FIELDS."""
  try:
    import tensorflow_datasets  # noqa: F401
  except ImportError as error:
    raise MissingDataError(
      "dataset 'tfds' needs tensorflow-datasets: pip install "
      "'adaptive-computation[tfds]'"
    ) from error
  builder = prepared_builder(config['builder'], config['data_dir'])
  return TfdsSource(builder, split, config['image_size'])
