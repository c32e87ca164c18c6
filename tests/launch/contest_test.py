"""Processes that take turns: fair order, honest about the dead, none left."""

import os
import subprocess
import sys

import numpy as np
import pytest

from launch import contest

# Answers every question with half a second for two examples, and writes down
# that it was asked; dies of question number `lives`.
FAKE = """
import json, sys
name, journal, lives = sys.argv[1], sys.argv[2], int(sys.argv[3])
for number, line in enumerate(sys.stdin):
  if number == lives:
    sys.exit('out of memory in ' + name)
  asked = json.loads(line)
  with open(journal, 'a') as file:
    file.write(f'{name} {asked.get("case")} {asked.get("calls")}\\n')
  calls = asked.get('calls', 1)
  print(json.dumps({'seconds': .5 * calls, 'examples': 2 * calls}), flush=True)
"""


@pytest.fixture
def journal(tmp_path):
  return tmp_path / 'journal'


@pytest.fixture
def reports():
  return []


@pytest.fixture
def processes(tmp_path, reports):
  with contest.Contest(tmp_path, 20.0, reports.append) as processes:
    yield processes


def start(processes, name, journal, lives=1000):
  command = [sys.executable, '-c', FAKE, name, str(journal), str(lives)]
  return processes.start(name, command, {'hello': 1})


def turn(name, case):
  return contest.Turn(name, 1, name, case)


def test_everybody_takes_turns_in_both_directions(processes, journal, reports):
  assert start(processes, 'a', journal) == {'seconds': 0.5, 'examples': 2}
  start(processes, 'b', journal)
  journal.unlink()
  shares = []
  samples = processes.run(
    [turn('a', 'x'), turn('b', 'y')],
    rounds=3,
    warmup=1,
    min_seconds=1.4,
    advance=lambda *progress: shares.append(progress),
  )
  # Once in the warm-up, then as often as 1.4 s need.
  expected = ['a x 1', 'b y 1']
  expected += ['a x 3', 'b y 3', 'b y 3', 'a x 3', 'a x 3', 'b y 3']
  assert journal.read_text().splitlines() == expected
  assert set(samples) == {('a', 1), ('b', 1)}
  np.testing.assert_allclose(samples['a', 1], [0.25] * 3)
  assert shares[:2] == [('warming up', 0.5), ('warming up', 1.0)]
  assert [name for name, _ in shares[2:]] == ['timing'] * 6
  np.testing.assert_allclose([s for _, s in shares[2:]], np.arange(1, 7) / 6)
  assert not reports


def test_one_that_dies_costs_only_its_own_results(processes, journal, reports):
  start(processes, 'a', journal)
  start(processes, 'b', journal, lives=3)  # in its first round that counts
  samples = processes.run(
    [turn('a', 'x'), turn('b', 'y')], rounds=3, warmup=1, min_seconds=0.1
  )
  assert set(samples) == {('a', 1)}
  assert list(processes.workers) == ['a']
  (line,) = reports
  assert 'b died (exit code 1)' in line
  assert 'out of memory in b' in line


def test_one_that_dies_at_once(processes, journal, reports):
  assert start(processes, 'b', journal, lives=0) is None
  assert processes.ask('b', {'case': 'y'}) is None
  assert len(reports) == 1
  assert 'out of memory in b' in processes.lost['b']


def test_one_that_hangs_is_ended(tmp_path, monkeypatch):
  command = [sys.executable, '-c', 'import time; time.sleep(1000)']
  worker = contest.Worker('sleeper', command, tmp_path / 'log')
  pid = worker._process.pid
  monkeypatch.setattr(contest, 'CLOSE_SECONDS', 0.1)
  with pytest.raises(contest.WorkerError, match='sleeper gave no answer'):
    worker.ask({}, timeout=0.1)
  assert not exists(pid)


def test_what_is_no_answer_is_reported(tmp_path):
  command = [sys.executable, '-c', 'input(); print("hello")']
  worker = contest.Worker('chatty', command, tmp_path / 'log')
  with pytest.raises(contest.WorkerError, match=r'hello.*no JSON'):
    worker.ask({}, timeout=20.0)


def test_no_process_is_left(tmp_path, journal):
  pids = []

  def interrupted():
    with contest.Contest(tmp_path, 20.0, print) as processes:
      for name in 'ab':
        start(processes, name, journal)
      pids.extend(one._process.pid for one in processes.workers.values())
      assert all(map(exists, pids))
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    interrupted()
  assert len(pids) == 2
  assert not any(map(exists, pids))


def exists(pid):
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True


def test_the_other_side(tmp_path):
  """`serve` answers; what a library prints goes where errors go."""
  program = """
from launch import contest
def build(question):
  print('a library says hello')
  return {'got': question}, {'case': lambda: 3, 'bad': lambda: 1 / 0}
contest.serve(build)
"""
  command = [sys.executable, '-c', program]
  log = tmp_path / 'log'
  worker = contest.Worker('real', command, log)
  assert worker.ask({'x': [1]}, 60.0) == {'got': {'x': [1]}}
  answer = worker.ask({'case': 'case', 'calls': 5}, 20.0)
  assert answer['examples'] == 15
  assert 0 <= answer['seconds'] < 20
  with pytest.raises(contest.WorkerError, match='ZeroDivisionError'):
    worker.ask({'case': 'bad', 'calls': 1}, 20.0)
  assert 'a library says hello' in log.read_text()


def test_a_worker_ends_with_its_parent(journal):
  """Whatever ends the parent: its pipe ends, and so does the worker."""
  program = f"""
import os, pathlib, subprocess, sys
from launch import contest
worker = contest.Worker('w', [sys.executable, '-c', {FAKE!r}, 'w',
                              {str(journal)!r}, '9'],
                        pathlib.Path({str(journal)!r} + '.log'))
worker.ask({{}}, 20.0)
print(worker._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
  environment = os.environ | {'PYTHONPATH': str(contest.ROOT)}
  done = subprocess.run(
    [sys.executable, '-c', program],
    capture_output=True,
    text=True,
    env=environment,
    timeout=60,
  )
  pid = int(done.stdout)
  for _ in range(100):
    if not exists(pid) or is_zombie(pid):
      return
    subprocess.run(['sleep', '0.05'], check=True)
  pytest.fail(f'process {pid} is still there')


def is_zombie(pid):
  try:
    with open(f'/proc/{pid}/stat') as file:
      return file.read().rpartition(')')[2].split()[0] == 'Z'
  except FileNotFoundError:
    return True
