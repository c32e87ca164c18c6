"""Images in folders: root/split/class/image.jpg, with no preparation step.

The classes are the sorted folders of `train`, or, without one, of all splits.
Hidden files and folders and files that are no images are left out.

A part of a split, as 'train[:90%]', has the same share of each class: rows of a
class are ordered by a checksum of their names, and classes interleaved. The
rows of a part are then sorted again by class and name.
"""

import dataclasses
import os
import pathlib
from typing import Annotated, Any

from absl import logging
from annotated_types import Len, Predicate

from core import files
from core.errors import BadRecord, InvalidDataError, MissingDataError
from dataset_lib import source, splits
from dataset_lib.image_ops import ImageOptions

Row = tuple[int, str]  # label and path
EXTENSIONS = ('.jpg', '.jpeg', '.png', '.webp', '.bmp')
TRAIN = 'train'
# A path would leave the root; +, [ and ] are of parts.
_FOLDER_NAME = r'[^./\\\0+\[\]][^/\\\0+\[\]]*'
LAYOUT = 'images lie in root/split/class/, like root/train/cat/1.jpg'


@dataclasses.dataclass(kw_only=True, eq=False)
class ImageFolder(ImageOptions):
  """Encoded images of one split."""

  split: Annotated[
    str,
    Predicate(lambda split: source.parts(split, _FOLDER_NAME)),
    f'the name of a folder in dataset.root, not a path, {source.PART_WORDS}',
  ]
  root: Annotated[str, Len(1), 'the folder that holds the splits']
  max_bad_share: source.BadShare = source.DEFAULT_BAD_SHARE

  def __post_init__(self) -> None:
    root = pathlib.Path(self.root).expanduser()
    if not root.is_dir():
      raise MissingDataError(f'dataset.root: no folder {root}; {LAYOUT}')
    self._root = root.resolve()
    splits = self._folders(self._root)
    of_classes = [splits[TRAIN]] if TRAIN in splits else splits.values()
    self._classes = sorted(set().union(*map(self._folders, of_classes)))

    def opened(name: str) -> list[Row]:
      if name not in splits:
        problem = f'no split {name!r} in {root}, which has {[*splits]}'
        raise MissingDataError(f'{problem}; {LAYOUT}')
      return self._open(splits[name])

    self._rows: list[Row] = []
    for _, rows, part in source.selected(self.split, opened, _FOLDER_NAME):
      self._rows += _part(rows, part)
    self.describe(len(self._classes), self._classes, len(self._rows))

  def _open(self, folder: str) -> list[Row]:
    """Returns label and path of the images of a split, sorted."""
    present = self._folders(folder)
    if unknown := sorted({*present} - {*self._classes}):
      names = ', '.join(unknown[:5])
      problem = f'{folder} has classes that {TRAIN} lacks: {names}'
      raise InvalidDataError(f'{problem}; give both the same class folders')
    entries = self._entries(folder)
    strays = [e.path for e in entries if _is_image(e) and not os.path.isdir(e)]
    if strays:
      raise InvalidDataError(f'{strays[0]} lies in no class folder; {LAYOUT}')
    if not present:
      raise InvalidDataError(f'no images in {folder}; {LAYOUT}')
    return [
      (label, os.path.join(present[name], image))
      for label, name in enumerate(self._classes)
      if name in present
      for image in self._images(present[name])
    ]

  def record(self, index: int) -> dict[str, Any]:
    """Returns {'image': file contents, 'label'}; BadRecord if unreadable."""
    label, path = self._rows[index]
    try:
      image = files.read_record(path)
    except OSError as error:
      raise BadRecord('unreadable', path, str(error)) from error
    return {'image': image, 'label': label}

  def where(self, index: int) -> str:
    """Returns the path of the image."""
    return self._rows[index][1]

  def item(self, index: int) -> dict[str, str]:
    """See `Source`."""
    return {'image': self.where(index)}

  def _images(self, folder: str) -> list[str]:
    """Returns the sorted names of the images of a class."""
    entries = self._entries(folder)
    images = [entry.name for entry in entries if _is_image(entry)]
    strays = [entry for entry in entries if not _is_image(entry)]
    if nested := [entry.path for entry in strays if os.path.isdir(entry)]:
      problem = f'is a folder inside a class folder; {LAYOUT}'
      raise InvalidDataError(f'{nested[0]} {problem}')
    if not images:
      problem = f'holds no images ({", ".join(EXTENSIONS)}); fill or remove it'
      raise InvalidDataError(f'class folder {folder} {problem}')
    if strays:
      name, message = files.printable(folder), '%s: left out %d other files'
      logging.warning(message, name, len(strays))
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
      files.check_inside(path, self._root)
    return sorted(entries, key=lambda entry: entry.name)


def _is_image(entry: os.DirEntry[str]) -> bool:
  return entry.name.lower().endswith(EXTENSIONS)


def _part(rows: list[Row], part: range) -> list[Row]:
  """Returns a part of sorted rows, sorted again; see the module."""
  if len(part) == len(rows):
    return rows
  sums = [_checksum(path) for _, path in rows]
  keys, labels = [*zip(sums, rows, strict=True)], [label for label, _ in rows]
  spread = splits.places(labels, keys, [1] * len(rows))
  order = sorted(zip(spread, keys, strict=True))
  return sorted(row for _, (_, row) in order[part.start : part.stop])


def _checksum(path: str) -> bytes:
  name = '/'.join(path.split(os.sep)[-2:])  # class and image
  return splits.checksum(os.fsencode(name))
