"""The log of a run: averages, their frequency, speed, what is compiled."""

import json
import re
import time
from unittest import mock

import numpy as np
import pytest

from tests.train_lib.carry_test import config_of
from train_lib import console, trainer
from train_lib.build import Setup
from train_lib.checkpoint import Checkpointer
from train_lib.phases import Planned
from train_lib.run_directory import RunDirectory

STEPS = 10


def logged(workdir):
  """The rows of a run by step."""
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return {row['step']: row for row in map(json.loads, lines)}


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
def let_pass(monkeypatch):
  """A function that adds seconds to the clock of trainer and console."""
  clock, added = time.monotonic, [0.0]
  for module in (trainer, console):
    fake = mock.Mock(monotonic=lambda: clock() + sum(added))
    monkeypatch.setattr(module, 'time', fake)
  return added.append


def test_speed_and_eta_leave_out_checkpoints(
  let_pass, tmp_path, monkeypatch, capsys
):
  save = Checkpointer.save

  def slow(*given):
    let_pass(1e6)
    save(*given)

  monkeypatch.setattr(Checkpointer, 'save', slow)
  config = config_of(STEPS, log_every=1, checkpoint=dict(every_steps=3))
  trainer.train(config, str(tmp_path))
  printed = capsys.readouterr().out
  speeds = [float(x) for x in re.findall(r'steps/s (\S+)', printed)]
  assert len(speeds) == STEPS
  assert min(speeds[1:]) > 1e-4
  assert 'day' not in printed


def test_the_eta_has_the_speed_of_the_last_steps(let_pass, tmp_path, capsys):
  run = mock.Mock(spec=RunDirectory, workdir=tmp_path)
  with console.Console(Setup(config_of(120)), run, 0, {}) as one:
    for step in range(1, 21):
      let_pass(100.0 if step < 6 else 1.0)
      one.log_step(step, {})
  first, second, *_, last = capsys.readouterr().out.splitlines()[-20:]
  assert first.endswith('ETA -')
  assert second.endswith('ETA -')
  assert re.search(r'ETA 0:0[12]:\d\d$', last)  # not 42 minutes


def test_a_compilation_is_said_before_and_is_left_out(
  let_pass, tmp_path, capsys
):
  run = mock.Mock(spec=RunDirectory, workdir=tmp_path)
  with console.Console(Setup(config_of()), run, 0, {}) as one:
    capsys.readouterr()
    with one.compiling(Planned(name='dense'), {'tokens': np.zeros((8, 4))}):
      before = capsys.readouterr().out
      let_pass(1e6)
  assert before == 'compiling the step of dense for tokens [8, 4]\n'
  assert re.fullmatch(r'compiled in 100000\d.\d s\n', capsys.readouterr().out)
  assert one.aside >= 1e6
