"""The table of programs: one compilation each, donation, devices, the cache."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import ConfigError
from serve_lib import programs as programs_lib
from serve_lib.chain import Grid, Group
from serve_lib.programs import Programs

GRID = Grid((4,), (1, 2))
ZEROS = np.zeros(2, np.int32)


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
  report = programs.compile(progress=False)
  return programs, report


def test_stages_that_are_the_same_function_compile_once():
  _, report = compiled(Loop())
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
