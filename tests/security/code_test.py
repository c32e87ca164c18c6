"""No name in a saved run makes a command import or call code of others."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from benchmarks import analyze
from core import registry
from core.errors import ConfigError
from launch import command_line, evaluate, export, predict
from tests.conftest import REPOSITORY
from train_lib import loading, run_directory

# It is imported, called and subclassed at will, and tells so.
EVIL = """
import os, pathlib
pathlib.Path(os.environ['MARKER']).touch()
def Model(*args, **kwargs):
  raise SystemExit(0)
"""
PLACES = (
  'task', 'model.name', 'dataset.name', 'evals.test.type',
  'evals.test.dataset.name', 'phases.0.model.name',
)  # fmt: skip
COMMANDS = {
  'evaluate': evaluate, 'analyze': analyze, 'export': export,
  'predict': predict,
}  # fmt: skip


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
  """A copy of a run with a module evil, where Python looks for modules."""
  monkeypatch.setattr(registry, '_folders', set())
  monkeypatch.setattr(registry, '_trusted', set())
  monkeypatch.setenv('MARKER', str(tmp_path / 'marker'))
  directory = shutil.copytree(trained, tmp_path / 'run')
  for place in (directory, tmp_path):
    monkeypatch.syspath_prepend(place)
    (place / 'evil.py').write_text(EVIL)
  yield directory
  assert not (tmp_path / 'marker').exists()


def change(directory, key, value):
  """Sets a dotted field of a saved configuration."""
  path = directory / 'config.json'
  config = node = json.loads(path.read_text())
  *groups, name = (int(k) if k.isdecimal() else k for k in key.split('.'))
  for group in groups:
    if isinstance(node, dict):
      node[group] = node.get(group) or {}
    node = node[group]
  node[name] = value
  path.write_text(json.dumps(config))


@pytest.fixture
def refuses(refused):
  """Runs a command that ends with one line; returns it."""

  def run(command, directory, *flags):
    others = ['--bundle=bundle'] * (command == 'export')
    given = [f'--workdir={directory}', *others, *flags]
    return refused(COMMANDS[command].main, given)

  return run


@pytest.mark.parametrize(
  ('place', 'command'),
  [(place, 'evaluate') for place in PLACES]
  + [('model.name', command) for command in COMMANDS],
)
def test_no_place_of_a_name(place, command, run, refuses):
  change(run, place, 'evil:Model')
  line = refuses(command, run)
  assert place.rpartition('phases.0.')[2] in line
  assert '--trust=evil' in line


@pytest.mark.parametrize('place', ['task', 'model.name'])
def test_no_teacher_and_no_resumed_run(place, run):
  change(run, place, 'evil:Model')
  with pytest.raises(ConfigError, match=place):
    loading.restore(run, loading.load_config(run))
  saved = json.loads((run / 'config.json').read_text())
  assert any('evil' in line for line in run_directory.changes(saved, {}))


@pytest.mark.parametrize(
  'name',
  [
    'logging:basicConfig', 'setuptools:setup', 'os:system', 'builtins:exec',
    'run.evil:Model', 'launch.train:Flags', 'tests.fakes:FakeImages',
    'train_lib.task:Task', 'adatape.model:nn', 'adatape.model:none',
    'eval_lib.evaluator:Classification', '__main__:x', 'adatape:x', 'a.b:c',
    'evil:Model\n', ['evil:Model'], {'evil': 1}, None, 7,
  ],
)  # fmt: skip
def test_no_other_name(name, run, refuses):
  victim = run / 'victim'
  victim.write_text('kept')
  values = {'filename': str(victim), 'filemode': 'w'}
  change(run, 'model', {'name': name, **values})
  assert 'model.name' in refuses('analyze', run)
  assert victim.read_text() == 'kept'


@pytest.mark.parametrize('name', ['evil:Model', 'run.evil:Model'])
def test_no_code_of_the_run_even_if_trusted(name, run, refuses, monkeypatch):
  (run.parent / 'evil.py').unlink()
  monkeypatch.chdir(run)
  change(run, 'model.name', name)
  package = name.partition('.')[0].partition(':')[0]
  refuses('analyze', run, f'--trust={package}')


def test_code_of_the_user_if_trusted(run, monkeypatch, refuses):
  text = 'from adatape.model import *\nfrom model_lib.vit import *\n'
  (run.parent / 'mine.py').write_text(text)
  before = json.loads((run / 'config.json').read_text())['model']['name']
  change(run, 'model.name', f'mine:{before.partition(":")[2]}')
  assert '--trust=mine' in refuses('evaluate', run)
  assert evaluate.main([f'--workdir={run}', '--trust=mine']) == 0


@pytest.mark.parametrize('shadow', ['adatape', 'numpy'])
def test_a_run_that_shadows_a_package(shadow, run, tmp_path):
  """The working directory is the run's, and Python looks there first."""
  (run / shadow).mkdir()
  (run / shadow / '__init__.py').write_text(EVIL)
  (run / shadow / 'model.py').write_text(EVIL)
  change(run, 'model.name', f'{shadow}.model:Model')
  done = subprocess.run(
    [sys.executable, '-m', 'benchmarks.analyze', '--workdir=.'],
    cwd=run, env=os.environ | {'PYTHONPATH': str(REPOSITORY)},
    capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == command_line.USAGE, done.stderr
