"""Encoded images in shards of `tf.train.Example`, as JFT and ImageNet are kept.

The shards of the split 'train' are the files `train-*.tfrecord`, or else
`train-*.array_record`, of a folder, in the order of their names; for example
`train-00000-of-01024.tfrecord`. Labels are numbers of classes in an int64 list,
counted from 0. TensorFlow is not imported.
"""

import dataclasses
import pathlib
import re
from typing import Annotated, Any

from annotated_types import Interval, Len, Predicate

from dataset_lib import record_files, source, tfds
from dataset_lib.errors import BadRecord, InvalidDataError, MissingDataError
from dataset_lib.image_ops import ImageOptions
from dataset_lib.record_files import Kind, RecordFiles, Shard

_KINDS: tuple[Kind, ...] = ('tfrecord', 'array_record')
_COUNT = re.compile(r'-of-(\d+)\.\w+$')  # at the end of a shard's name

Key = Annotated[str, Len(1), 'the name of a feature']


@dataclasses.dataclass(kw_only=True, eq=False)
class ImageRecords(ImageOptions):
  """Images and labels of one split.

  With `max_labels` 0 a record has exactly one label, else up to that number.
  """

  split: Annotated[
    str, Predicate(source.parts), "a split or a part, like 'train[:99%]'"
  ]
  directory: Annotated[str, Len(1), 'the folder of the shards']
  num_classes: Annotated[int, Interval(ge=2, le=2**24)]
  image_key: Key = 'image/encoded'
  label_key: Key = 'image/class/label'
  max_labels: source.MaxLabels = 16
  max_bad_share: source.BadShare = source.DEFAULT_BAD_SHARE

  def __post_init__(self) -> None:
    self._example = tfds.load(
      'tensorflow_datasets.proto', "dataset 'records'"
    ).tf_example_pb2.Example
    folder = pathlib.Path(self.directory).expanduser()
    parts = source.parts(self.split)
    found = {part.name: shards_of(folder, part.name) for part in parts}
    if len({kind for kind, _ in found.values()}) > 1:
      raise InvalidDataError(f'{folder}: files of {self.split} in two formats')
    kind = found[parts[0].name][0]
    counts = {
      name: record_files.count_records(files, kind)
      for name, (_, files) in found.items()
    }
    shards = [
      shard
      for part in parts
      for shard in _cut(found[part.name][1], counts[part.name], part)
    ]
    if not shards:
      raise InvalidDataError(f'{folder}: the split {self.split} is empty')
    self._records = RecordFiles(shards, kind)
    self.where = self._records.where
    self.describe(self.num_classes, (), len(self._records), self.max_labels)

  def record(self, index: int) -> dict[str, Any]:
    """Returns {'image': encoded bytes, 'label': list of int, or int}."""
    from google.protobuf import message

    data = self._records[index]
    try:
      features = self._example.FromString(data).features.feature
    except message.DecodeError as error:
      raise BadRecord('unparsable', self.where(index), str(error)) from error
    for key in (self.image_key, self.label_key):
      words = f'no feature {key!r}, but {", ".join(sorted(features))}'
      source.require(key in features, 'unparsable', words)
    images = features[self.image_key].bytes_list.value
    source.require(
      len(images) == 1,
      'unparsable',
      f'{self.image_key}: expected 1 image, got {len(images)}',
    )
    labels = list(features[self.label_key].int64_list.value)
    if self.max_labels:
      return {'image': images[0], 'label': labels}
    words = f'{self.label_key}: expected 1 label, got {len(labels)}; '
    words += 'dataset.max_labels allows more'
    source.require(len(labels) == 1, 'unparsable', words)
    return {'image': images[0], 'label': labels[0]}


def shards_of(folder: pathlib.Path, split: str) -> tuple[Kind, list[str]]:
  """Returns format and sorted paths of the shards of a split.

  Raises MissingDataError if there are none, or fewer than their names say.
  """
  for kind in _KINDS:
    if files := sorted(map(str, folder.glob(f'{split}-*.{kind}'))):
      counts = {int(m[1]) for file in files if (m := _COUNT.search(file))}
      if counts - {len(files)}:
        raise MissingDataError(
          f'{folder} has {len(files)} shards of {split}, but their names say '
          f'{", ".join(map(str, sorted(counts)))}; copy the others'
        )
      return kind, files
  wanted = ' or '.join(f'{split}-*.{kind}' for kind in _KINDS)
  raise MissingDataError(f'dataset.directory: no files {wanted} in {folder}')


def _cut(files: list[str], counts: list[int], part: source.Part) -> list[Shard]:
  """Returns the shards, or pieces of them, that hold a part of a split."""
  first, last, _ = part.rows(sum(counts)).indices(sum(counts))
  pieces, start = [], 0
  for file, count in zip(files, counts, strict=True):
    skip = min(max(first - start, 0), count)
    take = min(max(last - start, 0), count) - skip
    if take > 0:
      pieces.append(Shard(file, skip, take, count))
    start += count
  return pieces
