"""Kept programs: what another wrote, exchanged or changed is not executed."""

import os
import stat

import jax
import numpy as np
import pytest
from jax._src import lru_cache

from core.errors import ConfigError
from serve_lib import program_cache
from serve_lib.program_cache import ProgramCache

X = np.arange(4.0, dtype=np.float32)


@pytest.fixture(autouse=True)
def user(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'user'))


def compile_all(folder, meanwhile=lambda *_: None):
  """Compiles two programs as a new process does; returns how many were kept.

  `meanwhile` changes their files before the context ends.
  """
  kept = []

  def listen(event, **_):
    if event == '/jax/compilation_cache/cache_hits':
      kept.append(event)

  jax.clear_caches()
  jax.monitoring.register_event_listener(listen)
  try:
    with ProgramCache(str(folder)).used():
      for factor in (2.0, 3.0):
        program = jax.jit(lambda x, factor=factor: x * factor)
        np.testing.assert_array_equal(program.lower(X).compile()(X), X * factor)
      meanwhile(*sorted(folder.glob('*-cache')))
  finally:
    jax.monitoring.unregister_event_listener(listen)
  return len(kept)


def exchange(first, second):
  first_bytes = first.read_bytes()
  first.write_bytes(second.read_bytes())
  second.write_bytes(first_bytes)


def exchange_with_codes(first, second):
  exchange(first, second)
  exchange(*(path.with_name(path.name + '.code') for path in (first, second)))


def open_to_others(first, second):
  first.chmod(0o666)


def link(first, second):
  first.rename(first.with_name('elsewhere'))
  first.symlink_to(first.with_name('elsewhere'))


def from_another_user(first, second):
  key = os.path.join(os.environ['XDG_CACHE_HOME'], 'adaptive_computation/key')
  os.unlink(key)


def without_code(first, second):
  os.unlink(f'{first}.code')


@pytest.mark.parametrize(
  ('change', 'compiled_again'),
  [
    (lambda *_: None, 0), (exchange, 2), (exchange_with_codes, 2),
    (open_to_others, 1), (link, 1), (without_code, 1), (from_another_user, 2),
  ],
)  # fmt: skip
def test_only_own_programs_are_executed(tmp_path, change, compiled_again):
  folder = tmp_path / 'programs'
  assert compile_all(folder) == 0
  change(*sorted(folder.glob('*-cache')))
  assert compile_all(folder) == 2 - compiled_again
  assert compile_all(folder) == 2


@pytest.mark.parametrize('change', [exchange, exchange_with_codes])
def test_a_program_put_there_in_use_is_not_signed(tmp_path, change):
  folder = tmp_path / 'programs'
  assert compile_all(folder, change) == 0
  assert compile_all(folder) == 0


def test_jax_alone_executes_an_exchanged_program(tmp_path, monkeypatch):
  """Else the test above would show nothing."""
  monkeypatch.setattr(program_cache, '_Signed', Unsigned)
  compile_all(tmp_path / 'programs')
  exchange(*sorted((tmp_path / 'programs').glob('*-cache')))
  with pytest.raises(AssertionError, match='not equal'):
    compile_all(tmp_path / 'programs')


class Unsigned(lru_cache.LRUCache):
  """JAX's own files."""

  def __init__(self, folder, key):
    super().__init__(str(folder), max_size=-1)


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
  ProgramCache(str(tmp_path / 'new'))
  assert stat.S_IMODE((tmp_path / 'new').stat().st_mode) == 0o700
  (tmp_path / 'new').chmod(0o770)
  with pytest.raises(ConfigError, match='nobody else can write'):
    ProgramCache(str(tmp_path / 'new'))
