"""Images in folders: root/split/class/image.jpg, with no preparation step.

The classes are the sorted folders of `train`, so that the labels of every
split agree; without a `train` folder they are the sorted union over all
splits. Hidden files and folders and files that are no images are left out.
Everything that would silently give other data than meant is an error.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
from absl import logging
from annotated_types import Len, Predicate
from jaxtyping import Int32

from dataset_lib.errors import BadRecord, InvalidDataError, MissingDataError
from dataset_lib.image_ops import ImageOptions
from dataset_lib.source import DEFAULT_BAD_SHARE, BadShare

EXTENSIONS = ('.jpg', '.jpeg', '.png', '.webp', '.bmp')
TRAIN = 'train'
LAYOUT = 'images lie in root/split/class/, like root/train/cat/1.jpg'


def is_folder_name(split: str) -> bool:
  """Returns whether a split is a single folder: a path would leave the root."""
  is_path = split.startswith('.') or bool(set(split) & set('/\\\0'))
  return bool(split) and not is_path


@dataclasses.dataclass(kw_only=True, eq=False)
class ImageFolder(ImageOptions):
  """Encoded images of one split; `root` is the folder of the splits.

  Raises:
    MissingDataError: no such folder.
    InvalidDataError: its layout is not usable.
  """

  split: Annotated[
    str,
    Predicate(is_folder_name),
    'the name of a folder in dataset.root, not a path',
  ]
  root: Annotated[str, Len(1), 'the folder that holds the splits']
  max_bad_share: BadShare = DEFAULT_BAD_SHARE

  def __post_init__(self) -> None:
    root, split = pathlib.Path(self.root).expanduser(), self.split
    if not root.is_dir():
      raise MissingDataError(f'dataset.root: no folder {root}; {LAYOUT}')
    self._root = root.resolve()
    self._folder = self._root / split
    if not self._folder.is_dir():
      others = ', '.join(self._folders(self._root)) or 'no folders'
      raise MissingDataError(
        f'no split {split!r} in {root}, which has {others}; {LAYOUT}'
      )
    self._classes = self._class_names()
    self._files, self._labels = self._scan()
    size = len(self._files)
    self.info = self.image_info(len(self._classes), self._classes, size)

  def __len__(self) -> int:
    return len(self._files)

  def record(self, index: int) -> dict[str, Any]:
    """Returns {'image': file contents, 'label'}; BadRecord if unreadable."""
    path = self.where(index)
    try:
      with open(path, 'rb') as file:
        image = file.read()
    except OSError as error:
      raise BadRecord('unreadable', path, str(error)) from error
    return {'image': image, 'label': int(self._labels[index])}

  def where(self, index: int) -> str:
    """Returns the path of the image."""
    name = self._classes[self._labels[index]]
    return os.path.join(self._folder, name, self._files[index])

  def _class_names(self) -> tuple[str, ...]:
    if (self._root / TRAIN).is_dir():
      return tuple(self._folders(self._root / TRAIN))
    splits = self._folders(self._root)
    found = [self._folders(self._root / split) for split in splits]
    return tuple(sorted(set().union(*found)))

  def _scan(self) -> tuple[list[str], Int32[np.ndarray, ' N']]:
    """Returns file names and labels, sorted by class and name."""
    present = self._folders(self._folder)
    unknown = sorted(set(present) - set(self._classes))
    if unknown:
      raise InvalidDataError(
        f'{self._folder} has classes that {self._root / TRAIN} lacks: '
        f'{", ".join(unknown[:5])}; give both splits the same class folders'
      )
    for entry in self._entries(self._folder):
      if _is_image_name(entry.name) and not entry.is_dir():
        raise InvalidDataError(
          f'{entry.path} lies in no class folder; {LAYOUT}'
        )
    found = [
      self._images(self._folder / name) if name in present else []
      for name in self._classes
    ]
    files = [name for images in found for name in images]
    if not files:
      raise InvalidDataError(f'no images in {self._folder}; {LAYOUT}')
    labels = np.arange(len(found), dtype=np.int32)
    return files, np.repeat(labels, [len(images) for images in found])

  def _images(self, folder: pathlib.Path) -> list[str]:
    """Returns the sorted names of the images in one class folder."""
    images, others = [], 0
    for entry in self._entries(folder):
      if _is_image_name(entry.name):
        images.append(entry.name)
      elif entry.is_dir():
        raise InvalidDataError(
          f'{entry.path} is a folder inside a class folder; {LAYOUT}'
        )
      else:
        others += 1
    if others:
      logging.warning(
        '%s: left out %d files that are no images', folder, others
      )
    if not images:
      raise InvalidDataError(
        f'class folder {folder} holds no images ({", ".join(EXTENSIONS)}); '
        'fill or remove it'
      )
    return sorted(images)

  def _folders(self, folder: pathlib.Path) -> list[str]:
    return sorted(e.name for e in self._entries(folder) if e.is_dir())

  def _entries(self, folder: pathlib.Path) -> Iterator[os.DirEntry[str]]:
    """Yields visible entries; refuses links that lead out of the root."""
    self._check_inside(folder)
    with os.scandir(folder) as entries:
      for entry in entries:
        if not entry.name.startswith('.'):
          if entry.is_symlink():
            self._check_inside(entry.path)
          yield entry

  def _check_inside(self, path: str | pathlib.Path) -> None:
    target = pathlib.Path(path).resolve()
    if not target.is_relative_to(self._root):
      raise InvalidDataError(
        f'{path} links to {target}, outside of {self._root}; copy the data, or '
        'give the folder it lies in as root'
      )


def _is_image_name(name: str) -> bool:
  return name.lower().endswith(EXTENSIONS)
