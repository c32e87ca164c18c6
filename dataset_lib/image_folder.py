"""Images in folders: root/split/class/image.jpg, with no preparation step.

The classes are the sorted folders of `train`, so that the labels of every
split agree; without a `train` folder they are the sorted union over all
splits. Hidden files and folders and files that are no images are left out.
Ambiguous layouts raise an error.
"""

import dataclasses
import os
import pathlib
import re
from typing import Annotated, Any

import numpy as np
from absl import logging
from annotated_types import Len, Predicate

from dataset_lib import data_files
from dataset_lib.errors import BadRecord, InvalidDataError, MissingDataError
from dataset_lib.image_ops import ImageOptions
from dataset_lib.source import DEFAULT_BAD_SHARE, BadShare

EXTENSIONS = ('.jpg', '.jpeg', '.png', '.webp', '.bmp')
TRAIN = 'train'
_FOLDER_NAME = re.compile(r'[^./\\\0][^/\\\0]*')  # a path would leave root
LAYOUT = 'images lie in root/split/class/, like root/train/cat/1.jpg'


@dataclasses.dataclass(kw_only=True, eq=False)
class ImageFolder(ImageOptions):
  """Encoded images of one split."""

  split: Annotated[
    str,
    Predicate(_FOLDER_NAME.fullmatch),
    'the name of a folder in dataset.root, not a path',
  ]
  root: Annotated[str, Len(1), 'the folder that holds the splits']
  max_bad_share: BadShare = DEFAULT_BAD_SHARE

  def __post_init__(self) -> None:
    root = pathlib.Path(self.root).expanduser()
    if not root.is_dir():
      raise MissingDataError(f'dataset.root: no folder {root}; {LAYOUT}')
    self._root = root.resolve()
    splits = self._folders(self._root)
    if self.split not in splits:
      others = ', '.join(splits) or 'no folders'
      raise MissingDataError(
        f'no split {self.split!r} in {root}, which has {others}; {LAYOUT}'
      )
    self._folder = splits[self.split]
    of_classes = [splits[TRAIN]] if TRAIN in splits else splits.values()
    self._classes = sorted(set().union(*map(self._folders, of_classes)))
    present = self._folders(self._folder)
    unknown = sorted({*present} - {*self._classes})
    if unknown:
      raise InvalidDataError(
        f'{self._folder} has classes that {splits[TRAIN]} lacks: '
        f'{", ".join(unknown[:5])}; give both splits the same class folders'
      )
    files = [e for e in self._entries(self._folder) if not os.path.isdir(e)]
    if stray := [file.path for file in files if _is_image(file)]:
      raise InvalidDataError(f'{stray[0]} lies in no class folder; {LAYOUT}')
    images = {name: self._images(path) for name, path in present.items()}
    counts = [len(images.get(name, ())) for name in self._classes]
    self._labels = np.repeat(np.arange(len(counts)), counts)
    self._files = [name for names in images.values() for name in names]
    if not self._files:
      raise InvalidDataError(f'no images in {self._folder}; {LAYOUT}')
    self.describe(len(counts), self._classes, len(self._files))

  def record(self, index: int) -> dict[str, Any]:
    """Returns {'image': file contents, 'label'}; BadRecord if unreadable."""
    path = self.where(index)
    try:
      image = data_files.read_bytes(path)
    except OSError as error:
      raise BadRecord('unreadable', path, str(error)) from error
    return {'image': image, 'label': int(self._labels[index])}

  def where(self, index: int) -> str:
    """Returns the path of the image."""
    name = self._classes[self._labels[index]]
    return os.path.join(self._folder, name, self._files[index])

  def _images(self, folder: str) -> list[str]:
    """Returns the sorted names of the images of a class."""
    entries = self._entries(folder)
    images = [entry.name for entry in entries if _is_image(entry)]
    others = [entry for entry in entries if not _is_image(entry)]
    if nested := [entry.path for entry in others if os.path.isdir(entry)]:
      words = f'is a folder inside a class folder; {LAYOUT}'
      raise InvalidDataError(f'{nested[0]} {words}')
    if not images:
      kinds = ', '.join(EXTENSIONS)
      raise InvalidDataError(
        f'class folder {folder} holds no images ({kinds}); fill or remove it'
      )
    if others:
      count = len(others)
      logging.warning('%s: left out %d files that are no images', folder, count)
    return images

  def _folders(self, folder: pathlib.Path | str) -> dict[str, str]:
    entries = self._entries(folder)
    return {entry.name: entry.path for entry in entries if os.path.isdir(entry)}

  def _entries(self, folder: pathlib.Path | str) -> list[os.DirEntry[str]]:
    """Returns visible entries by name; refuses links out of the root."""
    with os.scandir(folder) as found:
      entries = [entry for entry in found if entry.name[0] != '.']
    links = [entry.path for entry in entries if entry.is_symlink()]
    for path in (folder, *links):
      data_files.check_inside(path, self._root)
    return sorted(entries, key=lambda entry: entry.name)


def _is_image(entry: os.DirEntry[str]) -> bool:
  return entry.name.lower().endswith(EXTENSIONS)
