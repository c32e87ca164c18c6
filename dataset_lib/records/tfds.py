"""TFDS data sets and shards of examples, read at random without TensorFlow."""

import dataclasses
import functools
import importlib
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Annotated, Any

from annotated_types import Interval, Len, Predicate

from core import errors, fields, files
from core.errors import InvalidDataError, MissingDataError
from dataset_lib import source
from dataset_lib.image_ops import ImageOptions
from dataset_lib.records import sharded
from dataset_lib.records.sharded import Kind, RecordFiles, Shard

_INFO_FILE, _FEATURES_FILE = 'dataset_info.json', 'features.json'
# name, name/config, name:1.2.3. No 'namespace:name': TFDS would fetch those
# from the network and run their code.
_NAME = re.compile(r'([a-z]\w*(/\w[\w.-]*)?(:\d+\.\d+\.\d+)?)?')
_CLASS_KEYS = ('type', 'pythonClassName', 'python_class_name')
# Names without a dot import nothing.
_OWN_CLASS = re.compile(r'[^.]*|tensorflow_datasets\..*', re.DOTALL)
_KINDS: tuple[Kind, ...] = ('tfrecord', 'array_record')  # preferred first
_COUNT = re.compile(r'-of-(\d+)\.\w+$')  # at the end of a shard's name

BuilderName = Annotated[
  str, Predicate(_NAME.fullmatch), "a TFDS name such as 'cifar10'"
]
Key = Annotated[str, Len(1), 'the name of a feature']
OwnKey = Annotated[str, "the name of a feature, or '' for the supervised one"]
MaxLabels = Annotated[int, Interval(ge=0, le=4096)]  # 0: one label a row
AnySplit = Annotated[
  str, Predicate(source.parts), "a split or a part, like 'train[:90%]'"
]
DataDir = Annotated[str, "a folder, or '' for ~/tensorflow_datasets"]


@dataclasses.dataclass(kw_only=True, eq=False)
class ShardedImages(ImageOptions):
  """Fields and places of images in shards; a subclass sets `_records`."""

  _records: Any = dataclasses.field(init=False, repr=False)  # `RecordFiles`
  split: AnySplit
  max_labels: MaxLabels = 0
  max_bad_share: source.BadShare = source.DEFAULT_BAD_SHARE

  def where(self, index: int) -> str:
    """Returns the file of a record and its row there."""
    return self._records.where(index)


@dataclasses.dataclass(kw_only=True, eq=False)
class TfdsImages(ShardedImages):
  """Encoded images of one split of a prepared builder, and their classes.

  A set with Sequence(ClassLabel) needs `max_labels`. `image_key`, `label_key`:
  features other than the supervised ones.
  """

  builder: BuilderName = ''
  data_dir: DataDir = ''
  image_key: OwnKey = ''
  label_key: OwnKey = ''

  def __post_init__(self) -> None:
    builder = prepared_builder(self.builder, self.data_dir, "dataset 'tfds'")
    self._keys = keys = self._features(builder.info)
    features = [builder.info.features[key] for key in keys]
    kinds, name = [type(f).__name__ for f in features], builder.info.full_name
    if kinds == ['Image', 'Sequence']:
      features[1] = features[1].feature
      kinds[1] = f'several {type(features[1]).__name__}'
    if kinds not in (['Image', 'ClassLabel'], ['Image', 'several ClassLabel']):
      got = ' to '.join(kinds) or 'no input to a label'
      raise InvalidDataError(f'{name} maps {got}, not Image to ClassLabel')
    if (kinds[1] == 'ClassLabel') != (self.max_labels == 0):
      expected = f'0 for one label a row, else >= 1; {name} has {kinds[1]}'
      field = 'dataset.max_labels'
      raise errors.ConfigError(field, self.max_labels, expected)
    self._records = examples(builder, self.split, keys)
    size, names = features[1].num_classes, features[1].names or ()
    self.describe(size, names, len(self._records))

  def _features(self, info: Any) -> list[str]:
    """Returns the names of image and label; ConfigError if there are none."""
    supervised = info.supervised_keys
    if not isinstance(supervised, tuple) or len(supervised) != 2:
      supervised = '', ''
    keys = [self.image_key or supervised[0], self.label_key or supervised[1]]
    for field, key in zip(('image_key', 'label_key'), keys, strict=True):
      if not isinstance(key, str) or key not in info.features:
        expected = f'one of the features {", ".join(info.features)}'
        raise errors.ConfigError(f'dataset.{field}', key, expected)
    return keys

  def record(self, index: int) -> dict[str, Any]:
    """Returns {'image': encoded bytes, 'label': int, or several}."""
    example = self._records[index]
    image, label = (example[key] for key in self._keys)
    return {'image': image, 'label': label}


def examples(builder: Any, split: str, keys: Sequence[str]) -> RecordFiles:
  """Opens features `keys` of the records of one split; images are encoded."""
  import tensorflow_datasets as tfds

  info, name = builder.info, builder.info.full_name

  def opened(part: str) -> range:
    if part not in info.splits:  # 'all' is none, and cannot be sliced
      legal = f'{", ".join(info.splits)}, parts and sums, like train+test[:9]'
      raise MissingDataError(f'{name} has no split {part!r}; it has {legal}')
    return range(info.splits[part].num_examples)

  shards: list[Any] = []
  for part, _, rows in source.selected(split, opened):
    bounds = f'[{rows.start}:{rows.stop}]' if rows else ''
    shards += info.splits[part + bounds].file_instructions
  kind = info.file_format.value
  if kind not in _KINDS:
    expected = f'expected {" or ".join(_KINDS)}'
    advice = 'prepare it again with --file_format=array_record'
    raise InvalidDataError(f'{name} is {kind}: {expected}; {advice}')
  if not sum(shard.take for shard in shards):
    raise InvalidDataError(f'{name}: the split is empty')
  features = {key: info.features[key] for key in keys}
  parse = tfds.features.FeaturesDict(features).deserialize_example_np
  encoded = {
    key: tfds.decode.SkipDecoding()
    for key, feature in features.items()
    if isinstance(feature, tfds.features.Image)
  }
  return RecordFiles(shards, kind, functools.partial(parse, decoders=encoded))


def _refuse_foreign_code(file: pathlib.Path) -> None:
  """Raises InvalidDataError for a features.json that names a foreign class.

  TFDS would import its module, also of a name in JSON within strings.
  """

  def check(pairs: list[tuple[str, Any]]) -> None:
    for key, value in pairs:
      for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and text.lstrip().startswith(('{', '[')):
          json.loads(text, object_pairs_hook=check)
        elif key in _CLASS_KEYS and not _OWN_CLASS.fullmatch(str(text)):
          expected = 'only features of tensorflow_datasets are read'
          raise InvalidDataError(f'{file} would import {text}; {expected}')

  with files.damage_of(file):
    files.read_json(file)  # refuses values that are nested too deeply
    json.loads(files.read_bytes(file), object_pairs_hook=check)


def load(module: str, user: str) -> Any:
  """Imports a module of TFDS; MissingDataError, naming `user`, without it."""
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise MissingDataError(
      f'{user} needs tensorflow-datasets: pip install '
      "'adaptive-computation[tfds]'"
    ) from error


def prepared_builder(name: str, data_dir: str, user: str) -> Any:
  """Returns the TFDS builder of a data set that is on disk.

  `data_dir` is that of TFDS, or the folder of one version; `user`: see `load`.
  """
  tfds = load('tensorflow_datasets', user)
  folder = pathlib.Path(data_dir or tfds.core.constants.DATA_DIR).expanduser()
  if data_dir and (folder / _INFO_FILE).is_file():
    _refuse_foreign_code(folder / _FEATURES_FILE)
    return tfds.builder_from_directory(folder)
  if not name:
    advice = 'name dataset.builder, or give the folder of a version'
    raise MissingDataError(f'{folder} holds no {_INFO_FILE}: {advice}')
  fields.check_value('dataset.builder', name, BuilderName)
  for file in (folder / re.split('[/:]', name)[0]).rglob(_FEATURES_FILE):
    _refuse_foreign_code(file)
  try:
    builder = tfds.builder(name, data_dir=folder)
  except tfds.core.DatasetNotFoundError as error:
    expected = f'a TFDS data set, or one prepared in {folder}'
    raise errors.ConfigError('dataset.builder', name, expected) from error
  if not (pathlib.Path(builder.data_dir) / _INFO_FILE).is_file():
    run = f'tfds build {name} --data_dir={folder} --file_format=array_record'
    raise MissingDataError(f'{name} is not prepared in {folder}; run\n  {run}')
  return builder


@dataclasses.dataclass(kw_only=True, eq=False)
class ImageRecords(ShardedImages):
  """Images in shards of `tf.train.Example`, as JFT and ImageNet are kept.

  The shards of 'train' are the files `train-*.tfrecord`, or else
  `train-*.array_record`, in the order of their names. Labels are an int64 list:
  with `max_labels` 0 one, else up to that number.
  """

  directory: Annotated[str, Len(1), 'the folder of the shards']
  num_classes: Annotated[int, Interval(ge=2, le=2**24)]
  image_key: Key = 'image/encoded'
  label_key: Key = 'image/class/label'
  max_labels: MaxLabels = 16

  def __post_init__(self) -> None:
    proto = load('tensorflow_datasets.proto', "dataset 'records'")
    folder = pathlib.Path(self.directory).expanduser()
    names = {part.name for part in source.parts(self.split)}
    by_split = {name: shards_of(folder, name) for name in names}
    kind, *others = {kind for kind, _ in by_split.values()}
    if others:
      raise InvalidDataError(f'{folder}: files of {self.split} in two formats')
    count = sharded.count_records
    counts = {name: count(paths, kind) for name, (_, paths) in by_split.items()}
    shards: list[Shard] = []
    totals = {name: range(sum(count)) for name, count in counts.items()}
    for name, _, rows in source.selected(self.split, totals.__getitem__):
      shards += _cut(by_split[name][1], counts[name], rows)
    if not shards:
      raise InvalidDataError(f'{folder}: the split {self.split} is empty')
    parse = proto.tf_example_pb2.Example.FromString
    self._records = RecordFiles(shards, kind, parse)
    self.describe(self.num_classes, (), len(self._records))

  def record(self, index: int) -> dict[str, Any]:
    """Returns {'image': encoded bytes, 'label': list of int, or int}."""
    features = self._records[index].features.feature
    for key in (self.image_key, self.label_key):
      problem = f'no feature {key!r}, but {", ".join(sorted(features))}'
      source.require(key in features, 'unparsable', problem)
    images = features[self.image_key].bytes_list.value
    problem = f'{self.image_key}: expected 1 image, got {len(images)}'
    source.require(len(images) == 1, 'unparsable', problem)
    kind = features[self.label_key].WhichOneof('kind') or 'int64_list'
    problem = f'{self.label_key}: expected an int64_list, got a {kind}'
    source.require(kind == 'int64_list', 'unparsable', problem)
    labels = list(features[self.label_key].int64_list.value)
    problem = f'{self.label_key}: expected 1 label, got {len(labels)}; '
    problem += 'dataset.max_labels allows more'
    source.require(self.max_labels or len(labels) == 1, 'unparsable', problem)
    label = labels if self.max_labels else labels[0]
    return {'image': images[0], 'label': label}


def shards_of(folder: pathlib.Path, split: str) -> tuple[Kind, list[str]]:
  """Returns format and sorted paths of the shards of a split.

  Raises MissingDataError if there are none, or fewer than their names say.
  """
  for kind in _KINDS:
    if paths := sorted(map(str, folder.glob(f'{split}-*.{kind}'))):
      for file in paths:  # before any is opened: a pipe would wait
        files.check_regular(file, folder)
      counts = {int(m[1]) for file in paths if (m := _COUNT.search(file))}
      if counts - {len(paths)}:
        named = ' or '.join(map(str, sorted(counts)))
        problem = f'{len(paths)} shards of {split}, but their names say {named}'
        raise MissingDataError(f'{folder} has {problem}; copy the others')
      return kind, paths
  wanted = ' or '.join(f'{split}-*.{kind}' for kind in _KINDS)
  raise MissingDataError(f'dataset.directory: no files {wanted} in {folder}')


def _cut(paths: list[str], counts: list[int], rows: range) -> list[Shard]:
  """Returns the shards, or pieces of them, that hold some rows of a split."""
  pieces, start = [], 0
  for file, count in zip(paths, counts, strict=True):
    skip = min(max(rows.start - start, 0), count)
    take = min(max(rows.stop - start, 0), count) - skip
    if take > 0:
      pieces.append(Shard(file, skip, take, count))
    start += count
  return pieces
