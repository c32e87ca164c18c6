"""GLUE's TSV files: the official ones and ones with named columns."""

import pathlib
from collections.abc import Sequence

from dataset_lib.errors import InvalidDataError, MissingDataError
from dataset_lib.glue_tasks import TASKS
from dataset_lib.tsv_files import (
  SUFFIXES,
  TsvTable,
  read_columns,
  read_lines,
)

# MRPC as Microsoft gives it: train and dev in one file, told apart by a list.
MSR_TRAIN, MSR_TEST = 'msr_paraphrase_train.txt', 'msr_paraphrase_test.txt'
MSR_DEV_IDS = 'dev_ids.tsv'
_MSR_IDS = ('#1 ID', '#2 ID')


def open_table(directory: str, task: str, split: str) -> TsvTable:
  """The rows of one split.

  Args:
    directory: the task's folder, or the parent of the folders of all tasks.
    task: name of the task.
    split: canonical name of the split.

  Raises:
    MissingDataError: there is no such file; the message has the legal names.
    InvalidDataError: it is damaged, empty, or has other columns.
  """
  path = _find(pathlib.Path(directory).expanduser(), task, split)
  what = TASKS[task]
  lines = read_lines(path)
  first = read_columns(path, lines[0][1])
  if what.headless and not any({*names} <= {*first} for names in what.texts):
    if len(first) != len(what.headless):
      raise InvalidDataError(
        f'{path}: expected a header, or the {len(what.headless)} columns '
        f'{", ".join(what.headless)}, got {", ".join(first)}'
      )
    return TsvTable(path, what.headless, lines, what)
  lines = lines[1:]
  if path.name == MSR_TRAIN:
    lines = _msr_rows(path, first, lines, split)
  return TsvTable(path, first, lines, what)


def _find(directory: pathlib.Path, task: str, split: str) -> pathlib.Path:
  names = _file_names(task, split)
  folders = (directory, directory / task, directory / TASKS[task].folder)
  for folder in folders:
    for name in names:
      if (folder / name).is_file():
        return folder / name
  raise MissingDataError(
    f'no split {split!r} of {task} in {directory}: expected '
    f'{", ".join(names)} there, in {task}/ or in {TASKS[task].folder}/'
  )


def _file_names(task: str, split: str) -> list[str]:
  stem = split.replace('validation', 'dev')
  stems = [stem] if stem == split else [stem, split]
  names = [stem + suffix for stem in stems for suffix in SUFFIXES]
  if task == 'mrpc':
    # Microsoft's test file has labels, the official test.tsv has none.
    return [MSR_TEST, *names] if split == 'test' else [*names, MSR_TRAIN]
  return names


def _msr_rows(
  path: pathlib.Path,
  columns: Sequence[str],
  lines: Sequence[tuple[int, bytes]],
  split: str,
) -> list[tuple[int, bytes]]:
  """The rows of MRPC's train or dev split out of Microsoft's one file."""
  ids_file = path.with_name(MSR_DEV_IDS)
  if not ids_file.is_file() or not {*_MSR_IDS} <= {*columns}:
    raise MissingDataError(
      f"{path} holds MRPC train and dev together: put GLUE's list of the dev "
      f'pairs beside it as {MSR_DEV_IDS}'
    )
  dev = {tuple(line.split(b'\t')[:2]) for _, line in read_lines(ids_file)}
  first, second = (columns.index(name) for name in _MSR_IDS)

  def is_dev(line: bytes) -> bool:
    # A row with too few columns is bad; it is counted with the training ones.
    fields = line.split(b'\t') + [b''] * len(columns)
    return (fields[first], fields[second]) in dev

  wants_dev = split == 'validation'
  return [entry for entry in lines if is_dev(entry[1]) == wants_dev]
