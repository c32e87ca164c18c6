"""Run directories: what is written, refused and confined."""

import json
import math
import subprocess
import sys

import jax
import pytest

from train_lib import run_directory
from train_lib.run_directory import (
  ConfigChangedError,
  RunDirectory,
  RunLockedError,
)

CONFIG = {
  'seed': 0,
  'log_every': 50,
  'optimizer': {'name': 'adamw', 'lr': 1e-3},
  'mesh': {'data': -1},
  'stages': {},
  'sizes': (1, 2),
}


def changed(**changes):
  return {**CONFIG, **changes}


def test_writes_configuration_and_versions(tmp_path, repository):
  with RunDirectory(tmp_path / 'a' / 'run', CONFIG) as run:
    config = json.loads(run.path('config.json').read_text())
    versions = json.loads(run.path('versions.json').read_text())
  assert config == {**CONFIG, 'sizes': [1, 2]}
  assert versions['python'] == sys.version.split()[0]
  assert versions['packages']['jax']
  revision = subprocess.run(
    ['git', 'rev-parse', 'HEAD'], cwd=repository, capture_output=True, text=True
  ).stdout.strip()
  assert versions['git']['revision'] == (revision or None)
  assert versions['git']['dirty'] in (True, False, None)


def test_asking_for_versions_touches_no_device(repository):
  code = """
import sys
from train_lib import run_directory
print(run_directory.versions()['packages']['jax'], 'jax' in sys.modules)
"""
  run = subprocess.run(
    [sys.executable, '-c', code], cwd=repository, capture_output=True, text=True
  )
  assert run.stdout.split() == [jax.__version__, 'False'], run.stderr


def test_a_second_run_is_refused(tmp_path):
  with RunDirectory(tmp_path, CONFIG):
    with pytest.raises(RunLockedError), RunDirectory(tmp_path, CONFIG):
      pass
    # Other processes of the same run are not.
    with RunDirectory(tmp_path, changed(seed=1), primary=False) as other:
      other.write_result({'never': 'written'})
      other.metrics.write(1, {})
    assert json.loads((tmp_path / 'config.json').read_text())['seed'] == 0
  assert not (tmp_path / 'result.json').exists()
  assert not (tmp_path / 'metrics.jsonl').exists()


def begin(tmp_path):
  with RunDirectory(tmp_path, CONFIG):
    (tmp_path / 'checkpoints' / '10').mkdir(parents=True)


def test_going_on_with_another_configuration_is_refused(tmp_path):
  begin(tmp_path)
  other = changed(
    seed=1, optimizer={'name': 'adamw', 'lr': 2e-3, 'b1': 0.9}, stages={'a': 1}
  )
  with (
    pytest.raises(ConfigChangedError) as error,
    RunDirectory(tmp_path, other),
  ):
    pass
  message = str(error.value)
  assert 'seed: saved 0, given 1' in message
  assert 'optimizer.lr: saved 0.001, given 0.002' in message
  assert 'optimizer.b1: saved nothing, given 0.9' in message
  assert 'optimizer.name' not in message
  assert json.loads((tmp_path / 'config.json').read_text())['seed'] == 0
  # The refusal gave the lock back.
  with RunDirectory(tmp_path, CONFIG):
    pass


def test_harmless_changes_are_taken_over(tmp_path):
  begin(tmp_path)
  with RunDirectory(tmp_path, changed(log_every=1, mesh={'data': 2})):
    pass
  config = json.loads((tmp_path / 'config.json').read_text())
  assert (config['log_every'], config['mesh']) == (1, {'data': 2})


def test_without_checkpoints_any_configuration_may_start(tmp_path):
  with RunDirectory(tmp_path, CONFIG):
    (tmp_path / 'checkpoints').mkdir()
    (tmp_path / 'checkpoints' / '10.orbax-checkpoint-tmp').mkdir()
  with RunDirectory(tmp_path, changed(seed=1)):
    assert json.loads((tmp_path / 'config.json').read_text())['seed'] == 1


def test_changes_compares_leaf_by_leaf():
  assert run_directory.changes({'a': {}}, {'a': {'b': math.nan}}, ()) == [
    'a: saved {}, given nothing',
    'a.b: saved nothing, given "NaN"',
  ]
  assert not run_directory.changes({'a': [1, None]}, {'a': (1, None)}, ())
  assert not run_directory.changes({'x': {'y': 1}}, {}, (r'x\..*',))


def test_result_is_written_whole(tmp_path):
  with RunDirectory(tmp_path, CONFIG) as run:
    run.write_result({'accuracy': 0.5, 'loss': math.inf})
  text = (tmp_path / 'result.json').read_text()
  assert json.loads(text) == {'accuracy': 0.5, 'loss': 'Infinity'}


@pytest.mark.parametrize('name', ['../x', '/etc/x', 'a/../../x', 'link/x'])
def test_names_that_lead_out_are_refused(tmp_path, name):
  workdir = tmp_path / 'run'
  workdir.mkdir()
  (workdir / 'link').symlink_to(tmp_path)
  with pytest.raises(ValueError, match='leads out of the run directory'):
    RunDirectory(workdir, CONFIG).path(name)


def test_names_inside_are_paths(tmp_path):
  run = RunDirectory(tmp_path, CONFIG)
  assert run.path('profile/x') == tmp_path / 'profile' / 'x'
