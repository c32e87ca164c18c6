"""Programs: one compilation each, donation, devices; those that are kept.

What another user wrote, or can write to, is not executed.
"""

import concurrent.futures
import contextlib
import functools
import os
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import machine
from core.errors import ConfigError
from serve_lib import program_cache
from serve_lib import programs as programs_lib
from serve_lib.chain import Grid, Group
from serve_lib.program_cache import ProgramCache
from serve_lib.programs import Programs

GRID = Grid((4,), (1, 2))
ZEROS = np.zeros(2, np.int32)
X = np.arange(4.0, dtype=np.float32)


class Loop:
  """The same stage over and over, as in a model with shared layers."""

  num_stages = 5
  variants = ('full',)

  def __init__(self):
    self.variables = {'step': np.float32(0.5)}

  def stage(self, index, variant, length):
    return self.iterate

  @staticmethod
  def iterate(variables, carry):
    x = carry['x'] * variables['step']
    return {'x': x, 'old': carry['x']}, {'sum': (x + carry['old']).sum(1)}

  def pad(self, rows, length, size):
    zeros = np.zeros((size, length), np.float32)
    return {'x': zeros, 'old': zeros}


def compiled(chain, grid=GRID):
  programs = Programs(chain, grid)
  report = programs.compile(progress=True)
  return programs, report


def test_stages_that_are_the_same_function_compile_once(capsys):
  _, report = compiled(Loop())
  assert 'compiling the programs of' in capsys.readouterr().err
  # Per batch size the first, the inner and the last stage; join at two sizes,
  # gather from and to the smaller and at the larger.
  assert report.programs == 2 * 3 + 2 + 3
  assert report.seconds > 0


def test_a_carry_of_the_same_shape_is_given_away():
  programs, _ = compiled(Loop())
  first = {name: np.full((2, 4), 8.0, np.float32) for name in ('x', 'old')}
  carry, outputs = programs.run(Group(0, 'full', 4), 2, first)
  second, outputs = programs.run(Group(1, 'full', 4), 2, carry)
  np.testing.assert_array_equal(outputs['sum'], [40.0, 40.0])  # 4 (2 + 8)
  np.testing.assert_array_equal(second['old'], np.full((2, 4), 4.0))
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(carry))
  assert np.all(first['x'] == 8.0)


def test_too_many_programs_are_an_error_before_the_compiler_aborts(
  monkeypatch, tmp_path
):
  limit = tmp_path / 'max_map_count'
  limit.write_text('10')
  monkeypatch.setattr(programs_lib, '_MAX_MAPS', str(limit))
  with pytest.raises(ConfigError) as error:
    compiled(Loop())
  assert error.value.field == 'engine.lengths'
  assert 'of 10 memory maps' in str(error.value)
  limit.unlink()  # a system without such a limit
  compiled(Loop())


def test_it_runs_where_the_variables_are():
  loop = Loop()
  device = jax.devices()[3]
  loop.variables = jax.device_put(loop.variables, device)
  programs, _ = compiled(loop)
  carry, _ = programs.run(Group(0, 'full', 4), 1, loop.pad([], 4, 1))
  pool = programs.copy('gather', Group(1, 'full', 4), (1, 2), carry, ZEROS)
  assert pool['x'].devices() == {device}


def test_a_carry_without_rows_is_an_error():
  class Wrong(Loop):
    @staticmethod
    def iterate(variables, carry):
      return {'x': carry['x'].sum(0), 'old': carry['old']}, {}

  with pytest.raises(ValueError, match=r"carry\['x'\] into .*expected 1 rows"):
    compiled(Wrong())


def test_what_a_stage_reads_may_depend_on_the_length():
  class Growing(Loop):
    num_stages = 1

    def __init__(self):
      self.variables = {str(n): jnp.asarray(n + 2.0) for n in range(9)}

    def stage(self, index, variant, length):
      def run(variables, carry):
        return carry, {'y': carry['x'] + variables[str(length)]}

      return run

  chain, grid = Growing(), Grid((4, 8), (2,))
  programs, _ = compiled(chain, grid)
  for length in grid.lengths:
    carry = chain.pad([], length, 2)
    _, outputs = programs.run(Group(0, 'full', length), 2, carry)
    assert (outputs['y'] == length + 2).all()


def test_lazy_programs_are_compiled_once_when_they_are_needed():
  programs = Programs(Loop(), GRID, lazy=True)
  assert programs.compile(progress=False).programs == 0
  for _ in range(2):
    carry = programs.chain.pad([], 4, 1)
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
      run = functools.partial(programs.run, Group(0, 'full', 4), 1)
      found = list(executor.map(run, [carry] * 2))
    programs.copy('gather', Group(1, 'full', 4), (1, 2), found[0][0], ZEROS)
    assert programs.compile(progress=False).programs == 2
  # The copy needs shapes of all stages before it, which are only traced.
  assert programs.widest_bytes == 2 * 2 * 4 * 4


# -- programs that are kept


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
