"""Images of one's own: folders of classes, of splits, or a table of paths.

  root/class/1.jpg         splits are made, see `dataset_lib.splits`
  root/split/class/1.jpg   the splits are folders
  labels.csv               a file that `dataset_lib.tables` reads, with columns
                           of paths (in its folder) and labels; splits are made

The classes are the sorted folders (of `train`, or, without one, of all splits)
or labels. Hidden files and folders and files that are no images are left out.
Images with the same bytes are in one of the splits that are made.
"""

import collections
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Len, Predicate

from core import files
from core.errors import BadRecord, InvalidDataError, MissingDataError
from dataset_lib import source, splits, tables
from dataset_lib.image_ops import ImageOptions
from dataset_lib.source import require

Rows = list[tuple[int, str]]  # labels and paths
EXTENSIONS = ('.jpg', '.jpeg', '.jfif', '.png', '.webp', '.bmp', '.gif')
TRAIN, ALL = 'train', 'all'  # 'all': the rows of all splits that are made
# A path would leave the root; +, [ and ] are of parts.
_FOLDER_NAME = r'[^./\\\0+\[\]][^/\\\0+\[\]]*'
LAYOUT = (
  'images lie in root/class/, like root/cat/1.jpg, or in root/split/class/'
)


@dataclasses.dataclass(kw_only=True, eq=False)
class ImageFolder(ImageOptions):
  """Encoded images of one split."""

  PLACE, HAS_FILES = 'root', True

  split: Annotated[
    str,
    Predicate(lambda split: source.parts(split, _FOLDER_NAME)),
    'train, validation, test or all, of a folder of splits the name of a '
    f'folder in dataset.root, not a path, {source.PART_WORDS}',
  ]
  root: Annotated[str, Len(1), 'the folder of the images, or a table of them']
  path: Annotated[str, Len(1), 'the column of the path in a table'] = 'path'
  label: Annotated[str, Len(1), 'the column of the label'] = 'label'
  # Rows of a group are in one split; '': images of the same bytes are a group.
  group: Annotated[str, "the column of a row's group, or ''"] = ''
  split_shares: splits.Shares = splits.SHARES
  split_seed: source.Seed = 0
  max_bad_share: source.BadShare = source.DEFAULT_BAD_SHARE

  def __post_init__(self) -> None:
    root = pathlib.Path(self.root).expanduser()
    if not root.exists():
      raise MissingDataError(f'dataset.root: no folder {root}; {LAYOUT}')
    self._root = (root if root.is_dir() else root.parent).resolve()
    self._names = {p.name for p in source.parts(self.split, _FOLDER_NAME)}
    self._others: collections.Counter[str] = collections.Counter()
    folders = self._folders(self._root) if root.is_dir() else {}
    self._given: dict[str, tuple[str, str]] = {}  # label and group by path
    made: dict[str, Rows] = {}
    about: dict[str, Any] = {}
    if not root.is_dir():
      made, about = self._made(self._listed(root))
    elif self._is_flat(folders):
      self._classes = [*folders]
      loose = [e.name for e in self._entries(self._root) if _is_image(e)]
      if loose:
        left = f'left out {len(loose)} images in no class folder: {loose[0]}'
        splits.warn_once(f'{root}: {left}, ...')
      made, about = self._made(self._rows_in(folders))
    elif not folders:
      raise MissingDataError(f'{root} has no folders of classes; {LAYOUT}')
    else:
      train = [folders[TRAIN]] if TRAIN in folders else folders.values()
      self._classes = sorted(set().union(*map(self._folders, train)))

    def opened(name: str) -> Rows:
      if name not in (known := made or folders):
        problem = f'no split {name!r} in {root}, which has {[*known]}'
        raise MissingDataError(f'{problem}; {LAYOUT}')
      return made[name] if made else self._open(folders[name])

    self._rows: Rows = []
    for _, rows, part in source.selected(self.split, opened, _FOLDER_NAME):
      self._rows += _part(rows, part)
    if not self._rows:
      few = 'has no images: add some to each class, or change split_shares'
      raise InvalidDataError(f'split {self.split!r} of {root} {few}')
    self._warn()
    if not made and TRAIN in folders and TRAIN not in self._names:
      self._warn_of_copies(folders[TRAIN])
    self.describe(len(self._classes), self._classes, len(self._rows))
    names = [(os.path.relpath(p, self._root), n) for n, p in self._rows]
    digest = splits.checksum(os.fsencode(repr(names))).hex()
    self.info = dataclasses.replace(self.info, splits=about, digest=digest)

  def _warn(self) -> None:
    """Logs classes that look alike, and how many files are left out."""
    splits.warn_of_look_alikes(self.root, self._classes)
    counts = [f'{k or "none"} {n}' for k, n in sorted(self._others.items())]
    if counts:
      left = f'left out other files, by suffix: {", ".join(counts)}'
      splits.warn_once(f'{self.root}: {left}')

  def _warn_of_copies(self, train: str) -> None:
    """Logs how many images have name and bytes of images of train."""
    names = {os.path.basename(path) for _, path in self._rows}
    known = [p for p in pathlib.Path(train).glob('*/*') if p.name in names]
    names &= {path.name for path in known}  # all that are read: trains are big
    own = [path for _, path in self._rows if os.path.basename(path) in names]
    keys = _contents([*map(str, known), *own])
    own_keys = keys[len(known) :] + [None] * (len(self._rows) - len(own))
    known_keys, where = keys[: len(known)], f'{self.root}, {self.split}'
    splits.warn_of_copies(where, 'images', known_keys, own_keys)

  def _open(self, folder: str) -> Rows:
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
    return self._rows_in(present)

  def _rows_in(self, folders: Mapping[str, str]) -> Rows:
    """Returns label and path of the images in the folders of classes."""
    return [
      (label, os.path.join(folders[name], image))
      for label, name in enumerate(self._classes)
      if name in folders
      for image in self._images(folders[name])
    ]

  def _is_flat(self, folders: Mapping[str, str]) -> bool:
    """Returns True for folders of classes, False for those of splits."""
    images, nested = [], []
    # Those of the split first: of a folder of splits no others are opened.
    for name in sorted(folders, key=lambda name: name not in self._names):
      for entry in self._entries(folders[name]):
        if os.path.isdir(entry):
          nested.append(entry.path)
        elif _is_image(entry):
          images.append(entry.path)
      if nested and name in self._names:
        return False
    if images and nested:
      both = f'has an image {images[0]} and a folder {nested[0]}'
      raise InvalidDataError(f'{self.root} {both}; {LAYOUT}')
    return bool(images)

  def _listed(self, file: pathlib.Path) -> Rows:
    """Returns the rows of a table; sets classes and, of train, bad rows."""
    columns = dict(path=self.path, label=self.label, group=self.group)
    table = tables.read(file, {*columns.values()} - {''})
    table.require(columns)
    good, bad = tables.read_all(tables.places(table), self._row)
    self._classes = sorted({label for _, (label, _) in good})
    self.bad_rows = bad if self._names & {TRAIN, ALL} else ()
    if not good and bad:
      raise InvalidDataError(f'{file}: no row can be used: {bad[0][1]}')
    labels = {name: label for label, name in enumerate(self._classes)}
    return sorted((labels[name], path) for _, (name, path) in good)

  def _row(self, values: Mapping[str, str]) -> tuple[str, str]:
    """Returns label and path of a row; BadRecord if there is no such file."""
    name, label = values[self.path], values[self.label].strip()
    require(label, 'illegal_label', 'the label is empty')
    path = self._root / name
    # `path.is_file` raises for a long name.
    require(name and os.path.isfile(path), 'missing', f'no file {path}')
    try:
      files.check_inside(path, self._root)
    except InvalidDataError as error:
      raise BadRecord('illegal_path', '', str(error)) from error
    group = values[self.group].strip() if self.group else ''
    known = self._given.setdefault(str(path), (label, group))
    message = 'an earlier row gives this image another label or group'
    require(known == (label, group), 'contradiction', message)
    return label, str(path)

  def _made(self, rows: Rows) -> tuple[dict[str, Rows], dict[str, Any]]:
    """Returns the rows of each split, and `DatasetInfo.splits`."""
    if len(self._classes) < 2:
      expected = f'expected 2 classes or more, got {self._classes}; {LAYOUT}'
      raise InvalidDataError(f'{self.root}: {expected}')
    paths = [os.path.relpath(path, self._root) for _, path in rows]
    names = [splits.checksum(os.fsencode(path)) for path in paths]
    first: dict[Any, bytes] = {}
    contents = _contents([path for _, path in rows])
    given = [self._given.get(path, ('', ''))[1] for _, path in rows]
    keys = [a or b for a, b in zip(given, contents, strict=True)]
    for key, name in zip(keys, names, strict=True):
      first[key] = min(name, first.get(key, name))
    described = [
      splits.Row((self._classes[label],), first[key], name)
      for (label, _), key, name in zip(rows, keys, names, strict=True)
    ]
    made, about = splits.make(described, self.split_shares, self.split_seed)
    taken = {name: sorted(rows[i] for i in made[name]) for name in made}
    about |= {'group': self.group} if self.group else {}
    return taken | {ALL: rows}, about

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
    self._others.update(os.path.splitext(stray.name)[1] for stray in strays)
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


def _contents(paths: list[str]) -> list[Any]:
  """Returns a key of each file, equal if its bytes are.

  Only files of equal sizes are read.
  """
  # A link may lead nowhere, which is counted when it is read.
  sizes = [os.path.exists(path) and os.path.getsize(path) for path in paths]
  often, keys = collections.Counter(sizes), []
  for path, size in zip(paths, sizes, strict=True):
    key: Any = size
    if often[size] > 1:
      try:
        key = hashlib.blake2b(files.read_record(path)).digest()
      except (OSError, BadRecord):  # which is counted when it is read
        key = path
    keys.append(key)
  return keys


def _part(rows: Rows, part: range) -> Rows:
  """Returns a part of sorted rows, sorted again.

  It has the same share of each class, ordered by a checksum of their names.
  """
  if len(part) == len(rows):
    return rows
  names = ['/'.join(path.split(os.sep)[-2:]) for _, path in rows]
  sums = [splits.checksum(os.fsencode(name)) for name in names]
  keys, labels = [*zip(sums, rows, strict=True)], [label for label, _ in rows]
  spread = splits.places(labels, keys, [1] * len(rows))
  order = sorted(zip(spread, keys, strict=True))
  return sorted(row for _, (_, row) in order[part.start : part.stop])
