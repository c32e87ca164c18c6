"""Kept programs: what another wrote, or can write to, is not executed."""

import contextlib
import os
import stat

import jax
import numpy as np
import pytest

from core import machine
from core.errors import ConfigError
from serve_lib import program_cache
from serve_lib.program_cache import ProgramCache
from serve_lib.programs import Programs
from tests.serve_lib.programs_test import GRID, Loop

X = np.arange(4.0, dtype=np.float32)


@contextlib.contextmanager
def hits():
  """Yields a list of the programs that JAX finds, as in a new process."""
  kept = []

  def listen(event, **_):
    if event == '/jax/compilation_cache/cache_hits':
      kept.append(event)

  jax.clear_caches()
  jax.monitoring.register_event_listener(listen)
  try:
    yield kept
  finally:
    jax.monitoring.unregister_event_listener(listen)


def compile_all(folder):
  """Compiles two programs; returns how many were kept."""
  with hits() as kept, ProgramCache(str(folder)).used():
    for factor in (2.0, 3.0):
      program = jax.jit(lambda x, factor=factor: x * factor)
      np.testing.assert_array_equal(program.lower(X).compile()(X), X * factor)
  return len(kept)


def test_a_second_process_finds_the_programs(tmp_path):
  before = jax.config.jax_compilation_cache_dir
  for count in (0, 11):
    programs = Programs(Loop(), GRID, cache_directory=str(tmp_path / 'new'))
    with hits() as kept:
      assert programs.compile(progress=False).programs == 11
    assert len(kept) == count
  assert jax.config.jax_compilation_cache_dir == before


def exchange(first, second):
  first_bytes = first.read_bytes()
  first.write_bytes(second.read_bytes())
  second.write_bytes(first_bytes)


def exchange_for_that_of_another(first, second):
  exchange(first, second)
  for path in (first, second):
    try:
      os.chown(path, 12345, -1)
    except PermissionError:
      pytest.skip('only root can give a file away')


def open_to_others(first, second):
  first.chmod(0o666)


def link(first, second):
  first.rename(first.with_name('elsewhere'))
  first.symlink_to(first.with_name('elsewhere'))


@pytest.mark.parametrize(('change', 'compiled_again'), [
  (lambda *_: None, 0), (exchange_for_that_of_another, 2),
  (open_to_others, 1), (link, 1),
])  # fmt: skip
def test_only_own_programs_are_executed(tmp_path, change, compiled_again):
  folder = tmp_path / 'programs'
  assert compile_all(folder) == 0
  change(*sorted(folder.glob('*-cache')))
  assert compile_all(folder) == 2 - compiled_again
  assert compile_all(folder) == 2


def test_jax_executes_what_it_finds(tmp_path):
  """Else the test above would show nothing."""
  compile_all(tmp_path / 'programs')
  exchange(*sorted((tmp_path / 'programs').glob('*-cache')))
  with pytest.raises(AssertionError, match='not equal'):
    compile_all(tmp_path / 'programs')


def test_a_torn_program_is_compiled_again(tmp_path):
  folder = tmp_path / 'programs'
  compile_all(folder)
  for path in folder.glob('*-cache'):
    path.write_bytes(path.read_bytes()[:-9])
  with pytest.warns(UserWarning, match='persistent compilation cache'):
    assert compile_all(folder) == 0


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """The cache folder of a user who has chosen no other."""
  monkeypatch.delenv(program_cache.DIRECTORY)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setattr(machine, 'cores', lambda: 3)
  return tmp_path / 'adaptive_computation' / 'steps-3'


def compile_step():
  """Compiles a program as a training does; returns how many were found."""
  with hits() as found, program_cache.kept():
    jax.jit(lambda x: x * 5.0).lower(X).compile()
  return len(found)


def test_the_next_training_finds_its_step(cache, capsys, monkeypatch):
  before = jax.config.jax_compilation_cache_dir
  assert (compile_step(), compile_step()) == (0, 1)
  (program,) = cache.glob('*-cache')
  assert jax.config.jax_compilation_cache_dir == before
  # A process that was killed while it wrote has left half a program.
  program.write_bytes(program.read_bytes()[:-9])
  program.with_name(program.name.replace('-cache', '-atime')).unlink()
  assert (compile_step(), compile_step()) == (0, 1)
  size = program.stat().st_size
  monkeypatch.setattr(program_cache, 'MAX_BYTES', size * 3 // 2)
  with program_cache.kept():
    jax.jit(lambda x: x * 7.0).lower(X).compile()
  assert compile_step() == 0  # the one used last was kept
  monkeypatch.setattr(machine, 'cores', lambda: 1)
  assert compile_step() == 0
  assert not capsys.readouterr().err


def test_the_folder_of_the_user_is_used_instead(cache, tmp_path, monkeypatch):
  monkeypatch.setenv(program_cache.DIRECTORY, str(tmp_path / 'other'))
  monkeypatch.setattr(jax.config, 'update', pytest.fail)
  compile_step()
  assert not cache.exists()


def test_a_folder_that_cannot_be_used_is_a_warning(cache, capsys):
  cache.parent.mkdir(mode=0o700)
  cache.touch()
  assert (compile_step(), compile_step()) == (0, 0)
  first, second = capsys.readouterr().err.splitlines()
  assert first == second
  assert f'{cache} is not a folder' in first
  assert program_cache.DIRECTORY in first


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
  ProgramCache(str(tmp_path / 'new'))
  assert stat.S_IMODE((tmp_path / 'new').stat().st_mode) == 0o700
  (tmp_path / 'new').chmod(0o770)
  with pytest.raises(ConfigError, match='nobody else can write'):
    Programs(Loop(), GRID, cache_directory=str(tmp_path / 'new'))
