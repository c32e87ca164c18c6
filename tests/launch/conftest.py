"""Fixtures of all commands."""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
import types

import flax.linen as nn
import jax
import pytest

from core import files
from dataset_lib import builder
from launch import cluster, command_line, sweep
from tests.golden import adapter
from train_lib import build
from train_lib.checkpoint import Checkpointer
from train_lib.run_directory import RunDirectory


@pytest.fixture
def refused(capsys):
  """Runs a command that ends with one line of words; returns the line.

  `code` None: 2 or 4, a wrong value or a damaged file.
  """

  def run(main, arguments, words=(), code=command_line.USAGE):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
      main([*arguments])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code in ((code,) if code else (2, 4))
    assert line.startswith('error: ')
    assert all(word in line for word in words), line
    return line

  return run


@pytest.fixture(scope='module')
def runs(tmp_path_factory, folders):
  """Returns runs by name, with drawn parameters, so that their rows differ.

  Each has its folder, config, info, task and variables.
  """
  folder = tmp_path_factory.mktemp('runs')

  def run(name, *overrides):
    place = folder / ' '.join([name, *overrides])
    return made(place, name, overrides, folders)

  return functools.cache(run)


def made(place, name, overrides, folders):
  flag, others = adapter.configs()[name]
  config = adapter.load(flag, [*others, *overrides], folders)
  info = builder.build_source(config.dataset, config.train_split).info
  info = dataclasses.replace(info, steps_per_epoch=7)
  task = build.build_task(config, info)
  names = 'params', 'model_state'
  init = adapter.filled(task.init, jax.random.key(0))
  tree = nn.unbox(dict(zip(names, init, strict=True)))
  with RunDirectory(place, config.to_dict(), info=info) as run:
    task.save_assets(run.workdir)
  extra = {'phase': 0, 'contract': dataclasses.asdict(info)}
  extra['model'] = config.model.to_dict()
  with Checkpointer(place / 'checkpoints') as checkpointer:
    checkpointer.save(1, tree, extra)
  return types.SimpleNamespace(
    folder=place, config=config, info=info, task=task, variables=tree
  )


@pytest.fixture
def no_process(monkeypatch):
  """Fails the test if it starts a process."""
  monkeypatch.setattr(subprocess, 'Popen', pytest.fail)


@pytest.fixture
def printed(capsys):
  """Returns what a dry run prints, which starts and writes nothing."""

  def run(*arguments):
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(subprocess, 'Popen', pytest.fail)
      patch.setattr(os, 'makedirs', pytest.fail)
      assert cluster.main([*arguments, '--dry_run']) == 0
    return capsys.readouterr().out

  return run


@pytest.fixture
def fakes(tmp_path, monkeypatch):
  """Puts programs of `{name: script}` on PATH."""

  def write(**scripts):
    for name, script in scripts.items():
      (tmp_path / name).write_text(script)
      (tmp_path / name).chmod(0o755)
    python = pathlib.Path(sys.executable).parent
    path = f'{tmp_path}:{python}:{os.environ["PATH"]}'
    monkeypatch.setenv('PATH', path)
    return tmp_path

  return write


class Trained:
  """Trainings of a sweep that end at once."""

  def __init__(self):
    self.runs, self.outcomes = [], {}

  def names(self):
    """The last values of the overrides of the runs."""
    return [run.name.rpartition('=')[2] for run in self.runs]

  def train(self, run):
    """Ends with a code, or with a result: by the run's name, or its value."""
    self.runs.append(run)
    value = self.names()[-1]
    outcome = self.outcomes.get(run.name, self.outcomes.get(value))
    if isinstance(outcome, int):
      return outcome
    result = outcome or {'test/accuracy': float(value)}
    files.write_json(run.workdir / 'result.json', result)
    return 0


@pytest.fixture
def trained(monkeypatch):
  """Replaces the trainings of sweeps."""
  trained = Trained()
  monkeypatch.setattr(sweep, 'train', trained.train)
  return trained
