"""What a run of others holds is not written through; what fails is printed."""

import errno
import json
import os
import shutil
import sys

import pytest

from benchmarks import analyze
from core import files
from core.errors import InvalidDataError
from launch import command_line, evaluate, export, predict, train
from tests.security.conftest import FLAGS
from train_lib.run_directory import ConfigChangedError, RunDirectory

KEPT = 'of the user\n'


@pytest.fixture
def run(trained, tmp_path):
  return shutil.copytree(trained, tmp_path / 'run')


@pytest.fixture
def victim(tmp_path):
  path = tmp_path / 'victim'
  path.write_text(KEPT)
  yield path
  assert path.read_text() == KEPT


WRITTEN = ('run.png', 'run.pdf', 'versions.json', 'result.json')


@pytest.mark.filterwarnings('ignore:.*line 1 is damaged')  # of the victim
@pytest.mark.parametrize(
  ('names', 'dangling'),
  [(WRITTEN, False), (WRITTEN, True), (('metrics.jsonl',), False)],
)
def test_training_replaces_links(names, dangling, run, victim):
  target = victim.parent / 'missing' if dangling else victim
  for name in names:
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(target)
  more = f'--workdir={run}', '--config.phases.0.steps=1'
  assert train.main([*FLAGS, *more]) == 0
  assert not (victim.parent / 'missing').exists()
  assert not [name for name in names if (run / name).is_symlink()]


@pytest.mark.parametrize('write', ['write_text', 'open_append', 'pictures'])
def test_no_writer_follows_a_link(write, victim, tmp_path):
  link = tmp_path / 'a.png'
  temporary = tmp_path / f'.a.png.{os.getpid()}.tmp'
  for path in (link, temporary, tmp_path / 'a.pdf'):
    path.symlink_to(victim)
  if write == 'open_append':
    with pytest.raises(OSError, match='symbolic links'):
      files.open_append(link)
  elif write == 'pictures':
    plots = pytest.importorskip('eval_lib.plots')
    pytest.importorskip('matplotlib')
    with plots.figure(link, [1], (3.0, 3.0)) as drawn:
      drawn.subplots()
    assert not link.is_symlink()
    assert not (tmp_path / 'a.pdf').is_symlink()
  else:
    files.write_text(link, 'new')
    assert link.read_text() == 'new'
    assert not link.is_symlink()


def link(path, target):
  path.rename(path.with_name('own'))
  path.symlink_to(target)


def link_folder(path, target):
  target.mkdir()
  path.symlink_to(target)


def pipe(path, _):
  path.unlink()
  os.mkfifo(path)


@pytest.mark.parametrize(
  ('name', 'change', 'error'),
  [
    ('run.lock', link, 'is not a regular file'),
    ('run.lock', pipe, 'is not a regular file'),
    ('checkpoints', link, 'is a link to those of'),
    ('profile', link_folder, 'links to .*, which would be written to'),
    ('checkpoints/set_aside', link_folder, 'links to .*, which would be wr'),
    ('config.json', lambda path, _: path.unlink(), r'config\.json is missing'),
  ],
)
def test_what_cannot_be_replaced_is_refused(name, change, error, run, victim):
  config = json.loads((run / 'config.json').read_text())
  other = shutil.copytree(run, run.parent / 'other')
  change(run / name, victim if name == 'run.lock' else other / name)
  with pytest.raises((InvalidDataError, ConfigChangedError), match=error):
    RunDirectory(run, config).__enter__()


@pytest.mark.parametrize(
  ('main', 'flags', 'file', 'words'),
  [
    (evaluate.main, '--workdir={}', 'evaluation.json', 'test/accuracy'),
    (analyze.main, '--workdir={}', '', 'sequence length'),
    (export.main, '--workdir={} --bundle={}/b --batches=1', 'b', ''),
  ],
)
def test_numbers_that_cannot_be_written_are_printed(
  main, flags, file, words, run, monkeypatch, capsys
):
  def fsync(_):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))

  monkeypatch.setattr(os, 'fsync', fsync)
  with pytest.raises(SystemExit) as stop:
    main(flags.format(run, run).split())
  shown = capsys.readouterr()
  assert stop.value.code == command_line.CHECKPOINT
  assert words in shown.out
  (line,) = shown.err.strip().splitlines()
  assert f'{file} cannot be written: {os.strerror(errno.EROFS)}' in line


def test_answers_that_cannot_be_written_end_the_command(refused, monkeypatch):
  def answer(flags):
    print('an answer', flush=True)

  main = command_line.Command('predict', '', predict.Flags, answer)
  words = ['output: No space left on device']
  with open('/dev/full', 'w') as full:
    monkeypatch.setattr(sys, 'stdout', full)
    refused(main, ['--workdir=.'], words, command_line.CHECKPOINT)
