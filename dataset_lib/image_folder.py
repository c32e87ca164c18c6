"""Images in folders: root/split/class/image.jpg, with no preparation step.

The classes are the sorted folders of `train`, so that the labels of every
split agree; without a `train` folder they are the sorted union over all
splits. Hidden files and folders and files that are no images are left out.
Everything that would silently give other data than meant is an error.
"""

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from absl import logging

from dataset_lib import fields, image_ops, source
from dataset_lib.errors import (
  BadRecord,
  ConfigError,
  InvalidDataError,
  MissingDataError,
)

EXTENSIONS = ('.jpg', '.jpeg', '.png', '.webp', '.bmp')
TRAIN = 'train'
LAYOUT = 'images lie in root/split/class/, like root/train/cat/1.jpg'

FIELDS = {
  'root': fields.text('the folder that holds the splits'),
  **image_ops.FIELDS,
  'max_bad_share': fields.real(0.0, 0.5, default=source.DEFAULT_BAD_SHARE),
}


class ImageFolderSource:
  """Encoded images of one split.

  Args:
    root: folder of the splits.
    split: name of one of its folders.
    image_size: side of the batches' images, for `info`.
  """

  def __init__(self, root: pathlib.Path, split: str, image_size: int):
    if not root.is_dir():
      raise MissingDataError(f'dataset.root: no folder {root}; {LAYOUT}')
    self._root = root.resolve()
    if not (self._root / split).is_dir():
      others = ', '.join(_folders(self._root, self._root)) or 'no folders'
      raise MissingDataError(
        f'no split {split!r} in {root}, which has {others}; {LAYOUT}'
      )
    self._folder = self._root / split
    self._classes = _class_names(self._root)
    self._files, self._labels = self._scan()
    self.info = source.DatasetInfo(
      input_key='image',
      input_shape=(image_size, image_size, 3),
      input_dtype='uint8',
      num_classes=len(self._classes),
      class_names=self._classes,
      num_examples=len(self._files),
    )

  def __len__(self) -> int:
    return len(self._files)

  def record(self, index: int) -> dict[str, Any]:
    """{'image': file contents, 'label': int}; BadRecord if unreadable."""
    path = self.where(index)
    try:
      with open(path, 'rb') as file:
        image = file.read()
    except OSError as error:
      raise BadRecord('unreadable', path, str(error)) from error
    return {'image': image, 'label': int(self._labels[index])}

  def where(self, index: int) -> str:
    """Path of the image."""
    name = self._classes[self._labels[index]]
    return os.path.join(self._folder, name, self._files[index])

  def _scan(self) -> tuple[list[str], np.ndarray]:
    """File names and labels, sorted by class and name."""
    files: list[str] = []
    counts = np.zeros(len(self._classes), np.int64)
    present = _folders(self._folder, self._root)
    unknown = sorted(set(present) - set(self._classes))
    if unknown:
      raise InvalidDataError(
        f'{self._folder} has classes that {self._root / TRAIN} lacks: '
        f'{", ".join(unknown[:5])}; give both splits the same class folders'
      )
    _refuse_loose_images(self._folder, self._root)
    for label, name in enumerate(self._classes):
      if name in present:
        found = _images(self._folder / name, self._root)
        counts[label] = len(found)
        files += found
    if not files:
      raise InvalidDataError(f'no images in {self._folder}; {LAYOUT}')
    return files, np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def _refuse_outside(path: str | pathlib.Path, root: pathlib.Path) -> None:
  """A link may point anywhere; data is read from inside the root only."""
  target = pathlib.Path(path).resolve()
  if not target.is_relative_to(root):
    raise InvalidDataError(
      f'{path} links to {target}, outside of {root}; copy the data, or give '
      'the folder it lies in as root'
    )


def _entries(
  folder: pathlib.Path, root: pathlib.Path
) -> Iterator[os.DirEntry[str]]:
  """Visible entries of a folder; refuses links that lead out of the root."""
  _refuse_outside(folder, root)
  with os.scandir(folder) as entries:
    for entry in entries:
      if entry.name.startswith('.'):
        continue
      if entry.is_symlink():
        _refuse_outside(entry.path, root)
      yield entry


def _folders(folder: pathlib.Path, root: pathlib.Path) -> list[str]:
  return sorted(e.name for e in _entries(folder, root) if e.is_dir())


def _class_names(root: pathlib.Path) -> tuple[str, ...]:
  if (root / TRAIN).is_dir():
    return tuple(_folders(root / TRAIN, root))
  splits = [_folders(root / split, root) for split in _folders(root, root)]
  return tuple(sorted(set().union(*splits)))


def _is_image_name(name: str) -> bool:
  return name.lower().endswith(EXTENSIONS)


def _images(folder: pathlib.Path, root: pathlib.Path) -> list[str]:
  """Sorted names of the images in one class folder."""
  images, others = [], 0
  for entry in _entries(folder, root):
    if _is_image_name(entry.name):
      images.append(entry.name)
    elif entry.is_dir():
      raise InvalidDataError(
        f'{entry.path} is a folder inside a class folder; {LAYOUT}'
      )
    else:
      others += 1
  if others:
    logging.warning('%s: left out %d files that are no images', folder, others)
  if not images:
    raise InvalidDataError(
      f'class folder {folder} holds no images ({", ".join(EXTENSIONS)}); '
      'fill or remove it'
    )
  return sorted(images)


def _refuse_loose_images(folder: pathlib.Path, root: pathlib.Path) -> None:
  for entry in _entries(folder, root):
    if _is_image_name(entry.name) and not entry.is_dir():
      raise InvalidDataError(f'{entry.path} lies in no class folder; {LAYOUT}')


def check_split(split: str) -> None:
  """Raises ConfigError unless the split is the name of a single folder.

  A path would lead out of the root.
  """
  if not split or split.startswith('.') or set(split) & set('/\\\0'):
    raise ConfigError(
      'split', split, 'the name of a folder in dataset.root, not a path'
    )


def build(config: Mapping[str, Any], split: str) -> ImageFolderSource:
  """The source of one split; `config` has every field of FIELDS."""
  root = pathlib.Path(config['root']).expanduser()
  return ImageFolderSource(root, split, config['image_size'])
