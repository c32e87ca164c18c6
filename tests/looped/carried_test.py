"""Training of `Carried`: the same on other devices, and after a stop or kill.

A toy with a carry, against a plain loop: tests/train_lib/carry_test.py.
"""

import functools
import shutil
from contextlib import closing

import jax
import pytest

from launch import command_line
from tests.launch import resume_test
from tests.shell import result
from tests.train_lib.carry_test import assert_equal
from tests.train_lib.states import assert_identical
from train_lib import trainer
from train_lib.build import Setup
from train_lib.checkpoint_io import find

pytestmark = pytest.mark.slow

CONFIG = 'configs/looped/puzzles.py:puzzle=sudoku4,train=carried'
MOST, STEPS, EVERY = 4, 6, 3
SMALL = (
  'model.width=16', 'model.num_heads=2', f'model.max_steps={MOST}',
  'loss.exploration=0.5', 'dataset.base=64', 'batch_size=16', 'evals={}',
  'tensorboard=false',
)  # fmt: skip
# Scores fall from the bias, because few answers are right yet. Rows that do not
# explore halt while scores are positive: here for 2 steps.
BIAS = 'model.score_bias=0.05'
ALWAYS = 'model.score_bias=1'  # positive for `resume_test.STEPS`


def config_of(devices=1, num_micro=1):
  return command_line.load_config(CONFIG, [
    *SMALL, BIAS, f'phases.0.steps={STEPS}', f'mesh.data={devices}',
    f'num_micro={num_micro}', f'checkpoint.every_steps={EVERY}',
  ])  # fmt: skip


@functools.cache
def run(devices=1, num_micro=1):
  """The state after each step."""
  setup, states = Setup(config_of(devices, num_micro)), []
  with jax.set_mesh(setup.mesh), closing(setup.dataset.batches()) as batches:
    state = setup.init()
    for _ in range(STEPS):
      batch = setup.put(next(batches))
      step, _ = setup.step(setup.phases[0], batch)
      state, _ = step(state, setup.frozen, batch, {}, setup.rates)
      states.append(jax.device_get(state))
  return states


def assert_mixed(carry):
  """Some rows have halted; others go on, after different numbers of steps."""
  halted = carry['halted']
  assert halted.any()
  assert len({*carry['steps'][~halted].tolist()}) > 1


def test_rows_halt_early_and_late_and_go_on():
  seen = set()
  for state in run():
    steps, halted = state.carry['steps'], state.carry['halted']
    seen |= {*zip(steps.tolist(), halted.tolist(), strict=True)}
  assert seen >= {(1, True), (1, False), (2, True), (2, False), (MOST, True)}
  assert_mixed(run()[EVERY - 1].carry)  # which `train` saves


@pytest.mark.parametrize('parts', [(1, 2), (8, 2)])
def test_devices_and_micro_batches_change_nothing(parts):
  for state, expected in zip(run(*parts), run(), strict=True):
    assert_equal(state, expected, 1e-5)  # integers and bools are equal


def train(workdir, devices=1):
  """Trains, and returns the arrays of the last checkpoint."""
  trainer.train(config_of(devices), str(workdir))
  return find(workdir).read()


def test_a_resumed_run_has_the_same_bits(tmp_path):
  expected = train(tmp_path / 'whole')
  shutil.rmtree(tmp_path / 'whole' / 'checkpoints' / str(STEPS))
  assert_mixed(find(tmp_path / 'whole').read('carry/'))
  resumed = shutil.copytree(tmp_path / 'whole', tmp_path / 'resumed')
  assert_identical(train(resumed), expected)
  assert_equal(train(tmp_path / 'whole', devices=8), expected, 1e-5)


@pytest.mark.nightly
def test_a_killed_run_continues_to_the_same_bits(tmp_path):
  flags = [f'--config.{field}' for field in (*SMALL, ALWAYS)]
  flags += [f'--config={CONFIG}', resume_test.EVERY_7]
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  resume_test.run(whole, *flags)
  process = resume_test.start(killed, *flags)
  resume_test.stop_at(killed, 31, resume_test.KILL, -resume_test.KILL, process)
  assert not (killed / 'result.json').exists()
  assert_mixed(find(killed).read('carry/'))
  resume_test.run(killed, *flags)
  assert result(killed)['steps_this_process'] <= resume_test.STEPS - 21
  resume_test.assert_same_run(whole, killed)
  assert_identical(find(killed).read(), find(whole).read())
