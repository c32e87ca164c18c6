"""Fixtures of all commands."""

import os
import pathlib
import subprocess
import sys

import pytest

from launch import cluster, command_line


@pytest.fixture
def refused(capsys):
  """Runs a command that ends with one line of words; returns the line."""

  def run(main, arguments, words=(), code=command_line.USAGE):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
      main([*arguments])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == code
    assert line.startswith('error: ')
    assert all(word in line for word in words), line
    return line

  return run


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
