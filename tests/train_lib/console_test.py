"""The log of a run: averages, their frequency, speed, what is compiled."""

import json
import time
from unittest import mock

import numpy as np
import pytest

from tests.train_lib.carry_test import config_of
from train_lib import trainer
from train_lib.build import Setup
from train_lib.console import Console
from train_lib.phases import Planned
from train_lib.run_directory import RunDirectory

STEPS = 10


def logged(workdir):
  """The rows of a run by step, without times."""
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return {
    row.pop('step'): {k: row[k] for k in row if not k.startswith('time/')}
    for row in map(json.loads, lines)
  }


@pytest.fixture(scope='module')
def every_step(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('every_step')
  trainer.train(config_of(STEPS, log_every=1), str(workdir))
  return logged(workdir)


@pytest.mark.parametrize('stop', [0, 4, 6])
def test_a_row_is_of_all_steps_since_the_last(
  stop, every_step, tmp_path, monkeypatch
):
  """Also if a process ended between two logs, after `stop` steps."""
  config = config_of(STEPS, log_every=4)
  if stop:
    with monkeypatch.context() as patch:
      count = trainer.PreemptionGuard.should_stop
      patch.setattr(
        trainer.PreemptionGuard, 'should_stop',
        lambda guard: count(guard) or guard._asked == stop,
      )  # fmt: skip
      with pytest.raises(trainer.Preempted):
        trainer.train(config, str(tmp_path))
  trainer.train(config, str(tmp_path))
  rows = logged(tmp_path)
  assert [*rows] == [4, 8, STEPS]
  for last, first in ((4, 1), (8, 5), (STEPS, 9)):
    steps = [every_step[n] for n in range(first, last + 1)]
    for name in ('train/loss', 'train/grad_norm'):
      mean = np.mean([row[name] for row in steps])
      assert rows[last][name] == pytest.approx(mean, rel=1e-12)
    for name in ('train/learning_rate', 'train/nonfinite'):
      assert rows[last][name] == steps[-1][name]


@pytest.mark.parametrize(
  ('steps', 'given', 'expected'),
  [(3, 0, 1), (120, 0, 2), (10**6, 0, 100), (120, 7, 7)],
)
def test_a_run_logs_about_fifty_times_unless_told(steps, given, expected):
  assert Setup(config_of(steps, log_every=given)).log_every == expected


@pytest.fixture
def console(tmp_path, monkeypatch):
  """A console of 100 steps, and a function that lets time pass."""
  setup, now = Setup(config_of(100)), [0.0]
  monkeypatch.setattr(time, 'monotonic', lambda: now[0])
  run = mock.Mock(spec=RunDirectory, workdir=tmp_path)

  def let_pass(seconds):
    now[0] += seconds

  with Console(setup, run, 0, {}) as made:
    yield made, let_pass


def test_speed_and_eta_are_of_steps_alone(console):
  console, let_pass = console
  console.advance(1)
  let_pass(4.0)  # two steps
  let_pass(50.0)  # an evaluation
  console.aside += 50.0
  with console.compiling(Planned(), {'tokens': np.zeros((8, 4))}):
    let_pass(30.0)
  let_pass(16.0)  # eight more
  console.log_step(11, {'loss': 1.0})
  row = console._rows[11]
  assert row['time/steps_per_second'] == pytest.approx(0.5)
  assert row['time/eta_seconds'] == pytest.approx(2.0 * 89)


def test_what_is_compiled_is_said_before_and_after(console, capsys):
  console, let_pass = console
  capsys.readouterr()
  with console.compiling(Planned(name='dense'), {'tokens': np.zeros((8, 4))}):
    before = capsys.readouterr().out
    let_pass(12.3)
  assert before == 'compiling the step of dense for tokens [8, 4]\n'
  assert capsys.readouterr().out == 'compiled in 12.3 s\n'
