"""What `launch.classify` does differently for texts and for images."""

import dataclasses
import itertools
import os
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from core import files
from core.errors import BadRecord, ConfigError, InvalidDataError
from launch import command_line

SETTINGS = 'classify.json'  # of a call, after its first training
DENSE, ADAPTIVE, SPEED = 'dense', 'adaptive', 'speed'  # folders of a call
RESULT = 'result.json'
MINILM = 'minilm'
SPLITS = 'train', 'validation', 'test'
QUARTER = 'validation[:25%]'  # to which both configurations fit temperatures
SHOWN_BAD = 20  # rows
LEAST_SIZE = 64  # of images in pixels
FROM_SCRATCH = {'variant': 'Ti/16', 'size': '64'}  # a ViT, without a checkpoint
SHORT = 'batch_size=64', 'phases.0.least_steps=200'  # overrides: few images

Arguments = dict[str, str]  # of a configuration file


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of data, as a model reads it that is adaptive on it."""

  config: str
  place: str  # field of the data set that names the data
  columns: tuple[str, ...]  # flags, and fields of the data set
  serve: str  # the option that reads the certificate
  spent: str  # field of an answer, its computation
  unit: str  # of it
  shown: str  # column of the texts, or of the paths of images
  plain: str  # the adaptive model without its certificate
  loss: str  # what may lose accuracy


KINDS: Mapping[str, Kind] = {
  'eat': Kind(
    'configs/texts.py', 'path', ('text', 'pair', 'label', 'source', 'group'),
    'tau=guaranteed', 'depth', 'layers', 'text', 'full depth', 'early exits',
  ),
  'adatape': Kind(
    'configs/images.py', 'root', ('path', 'label', 'group'),
    'setting=guaranteed', 'tape_length', 'tape tokens', 'image', 'as trained',
    'shorter tapes',
  ),
}  # fmt: skip


def columns(flags: Any) -> Arguments:
  """Returns the columns that flags name; ConfigError for those of others."""
  others = _others(flags.model)
  command_line.refuse(flags, others, f'none with --model={flags.model}')
  return {name: getattr(flags, name) for name in KINDS[flags.model].columns}


def _others(model: str) -> list[str]:
  """Returns the names of flags of the other kind of data."""
  names = {name for kind in KINDS.values() for name in kind.columns}
  others = [*names - {*KINDS[model].columns}]
  return [*others, 'size'] if model == 'eat' else others


def pretrained(flags: Any) -> str:
  """Returns the checkpoint that the dense model starts from, '' for none."""
  if flags.model == 'adatape' and flags.pretrained == MINILM:
    raise ConfigError('--pretrained', MINILM, "a ViT, or '' for none")
  if flags.model == 'adatape' or flags.pretrained not in ('', MINILM):
    return flags.pretrained
  from model_lib import convert

  return str(convert.packaged_minilm())


def trainings(
  flags: Any, dense: files.Path
) -> dict[str, tuple[Arguments, Sequence[str]]]:
  """Returns arguments and overrides of the two runs, by their folders."""
  if flags.model == 'eat':
    _refuse_images(pathlib.Path(flags.data).expanduser(), flags)
  start = pretrained(flags)
  if flags.model == 'eat':
    first = {'model': 'dense', 'pretrained': start}
    return {
      DENSE: (first, ()),
      ADAPTIVE: ({'model': 'eat', 'teacher': str(dense)}, ()),
    }
  folder = pathlib.Path(flags.data).expanduser() / 'train'
  if any(path.is_dir() for path in folder.glob('*')):
    expected = 'a folder of classes, or a table: their splits are made'
    raise ConfigError('data', flags.data, expected)
  tuned = {'pretrained': start, 'finetune': '1'}
  vit = {'model': 'vit'} | (tuned if start else FROM_SCRATCH)
  vit |= {'size': str(flags.size)} if flags.size else {}
  tape = {'model': 'input', 'certify': '1'} | tuned | {'pretrained': str(dense)}
  # The head too: the classes are those of the dense run.
  later = (*SHORT, 'warm_start.skip=()')
  return {DENSE: (vit, () if start else SHORT), ADAPTIVE: (tape, later)}


def _refuse_images(data: pathlib.Path, flags: Any) -> None:
  """Raises ConfigError for a folder, or a table, of images."""
  from dataset_lib import image_folder, tables

  if data.is_dir():
    inside = itertools.chain(data.glob('*/*'), data.glob('*/*/*'))
    suffixes = (path.suffix.lower() for path in inside)
    found = any(suffix in image_folder.EXTENSIONS for suffix in suffixes)
  else:
    columns = tables.read(data, ()).columns if tables.form_of(data) else ()
    found = flags.path in columns and flags.text not in columns
  if found:
    expected = 'adatape, as the data are images; add --model=adatape'
    raise ConfigError('--model', flags.model, expected)


def check(
  flags: Any,
  config: str,
  overrides: Sequence[str],
  later: tuple[str, Sequence[str]] | None = None,
  tells: bool = False,
) -> None:
  """Opens the data, so that a mistake is told before anything is trained.

  `later`: configuration and overrides of the second run, checked too. `tells`:
  prints the rows of each class and split, and bad rows. Raises ConfigError that
  names a flag, MissingDataError, InvalidDataError or TooManyBadRecordsError.
  """
  from dataset_lib import bad_records, builder

  kind, has_images = KINDS[flags.model], flags.model == 'adatape'
  try:
    dataset = command_line.load_config(config, overrides).dataset
    opened: dict[str, Any] = {
      split: builder.build_source(dataset, split)
      for split in (SPLITS if tells or has_images else SPLITS[:1])
    }
    fitted: Any = builder.build_source(dataset, QUARTER)
  except ConfigError as error:
    name = error.field.removeprefix('dataset.')
    if name == 'split':
      few = f'{flags.data}: too few rows for temperatures and a certificate: '
      raise InvalidDataError(f'{few}{error}') from error
    field = 'data' if name == kind.place else f'--{name}'
    if name != kind.place and name not in kind.columns:
      raise
    raise ConfigError(field, error.given, error.expected) from error
  if has_images and dataset.image_size < LEAST_SIZE:
    expected = f'{LEAST_SIZE} or more, for a tape of patches of 8 pixels'
    raise ConfigError('--size', dataset.image_size, expected)
  if later:
    command_line.load_config(*later)
  for split, source in opened.items():
    bad_records.BadRecords.of(source, train=split == SPLITS[0])
  if has_images:
    _check_images(opened)
  if tells:
    _tell(opened)
    if not has_images:
      others = {*fitted.contents(), *opened['train'].contents()}
      # As the certificate counts them: copies once.
      _tell_epsilon(len({*opened['validation'].contents()} - others))


def check_rows(workdir: pathlib.Path) -> None:
  """Raises ConfigError unless the data are those a finished run has."""
  from dataset_lib import builder, contract
  from train_lib import loading, run_directory

  config = loading.load_config(workdir)
  if not config.allow_other_rows:
    info = builder.build_source(config.dataset, SPLITS[0]).info
    whose = f'{workdir} was trained on; restore the data, or use another --out'
    run = run_directory.load_info(workdir)
    contract.check(run, info, contract.ROWS, 'dataset', whose)


def _check_images(opened: Mapping[str, Any]) -> None:
  """Raises TooManyBadRecordsError that names the damaged images of all splits.

  Training tolerates a share of its own, if no others are damaged.
  """
  from dataset_lib import bad_records, image_ops

  bad, ends = [], [0]
  for source in opened.values():
    for index in range(len(source)):
      try:
        data = source.record(index)['image']
        by = 8 if image_ops.jpeg_size(data) else 1  # much faster
        image_ops.decode(data, by, source.max_pixels)
      except BadRecord as error:
        one = BadRecord(error.kind, source.where(index), error.message)
        bad.append((ends[-1] + index, one))
    ends.append(ends[-1] + len(source))
  if bad and bad[-1][0] < ends[1]:
    counts = bad_records.BadRecords.of(opened[SPLITS[0]], train=True)
  else:
    counts = bad_records.BadRecords(ends[-1], 0.0, 'all splits')
  counts.count(bad)


def _tell(opened: Mapping[str, Any]) -> None:
  """Prints a table of classes and splits, and the first bad rows."""
  from eval_lib import report

  names = opened[SPLITS[0]].info.class_names
  rows: list[dict[str, Any]] = [{'class': name} for name in ('all', *names)]
  for split, source in opened.items():
    labels = [source.record(index)['label'] for index in range(len(source))]
    counts = np.bincount(labels, minlength=len(names)).tolist()
    for row, count in zip(rows, [len(source), *counts], strict=True):
      row[split] = count
  bad = [one for source in opened.values() for _, one in source.bad_rows]
  lines = [f'{one.where}: {one.message}' for one in bad[:SHOWN_BAD]]
  said = '\n'.join([f'{len(bad)} bad rows', *lines])
  report.print_table('rows, nothing is trained', rows, said)


def _tell_epsilon(rows: int) -> None:
  """Prints what so many distinct rows of validation can certify."""
  from eval_lib import certificate, risk

  epsilon = certificate.smallest(rows)
  needed = risk.least_rows('accuracy', 'sequence', epsilon, 0.1, groups=1)
  few = '' if rows >= needed else f': too few, at least {needed} are needed'
  limit = f'epsilon={epsilon:g}, delta=0.1'
  print(f'certificate: {rows} distinct rows of validation, {limit}{few}')


def redraw(workdir: str) -> str:
  """Returns the command that draws the report of a run again, '' for none."""
  run = pathlib.Path(os.path.abspath(workdir))
  out = run.parent
  drawn = all((out / n).is_file() for n in (SETTINGS, 'report.json'))
  if run.name != ADAPTIVE or not drawn:
    return ''
  values = files.read_object(out / SETTINGS)
  data, overrides = values.pop('data'), values.pop('overrides')
  others = _others(values['model'])
  given = [f'--{k}={v}' for k, v in values.items() if v and k not in others]
  given += [f'--config.{one}' for one in overrides]
  words = 'python', '-m', 'launch.classify', data, *given, f'--out={out}'
  return shlex.join(words)


def measurements(
  flags: Any, out: pathlib.Path, tau: float | None
) -> dict[pathlib.Path, list[str]]:
  """Returns commands of `python` after the trainings, by a file they write."""
  # Without a certificate every row runs to full depth.
  served = () if tau is None else (f'--tau={tau}',)
  times = 'never' if tau is None else f'never,confidence={tau:g}'
  run, rows = f'--workdir={out / ADAPTIVE}', f'--rows={flags.timed_rows}'
  given, speed = (run, f'--dense={out / DENSE}', rows), out / SPEED
  timed, shown = {}, {}
  if flags.model == 'eat':
    timed[speed / RESULT] = [
      '-m', 'benchmarks.eat', *given, '--split=test', *served,
      f'--time={times}', '--prune_scales=1', '--peers=onnx', '--warmup=8',
      f'--out={speed}',
    ]  # fmt: skip
  else:
    speed.mkdir(exist_ok=True)
    path, tapes = speed / 'timings.csv', out / 'tapes'
    timed[path] = ['-m', 'benchmarks.own_images', *given, f'--out={path}']
    shown[tapes / 'summary.csv'] = [
      '-m', 'benchmarks.analyze', run, '--split=test', f'--out={tapes}'
    ]  # fmt: skip
  return (timed if flags.timed_rows else {}) | shown


def arguments(values: Arguments) -> str:
  """Returns the argument of a configuration file; ConfigError for a comma."""
  for name, value in values.items():
    if ',' in value:
      expected = 'a path or a column without commas; rename it'
      raise ConfigError(f'--{name}', value, expected)
  return ','.join(f'{name}={value}' for name, value in values.items())
