"""The measuring core: a clock that the test turns, processes that die."""

import functools
import itertools
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks import timing
from benchmarks.timing import Call, Candidate, Hosts
from eval_lib.report import Estimate
from tests.conftest import REPOSITORY


@pytest.fixture
def timed(monkeypatch):
  """Times candidates whose calls turn a clock; the first is the baseline."""
  now, called = [0.0], []
  monkeypatch.setattr(timing.time, 'perf_counter', lambda: now[0])
  monkeypatch.setattr(timing.time, 'sleep', lambda seconds: None)

  def run(name, seconds, drift):
    now[0] += seconds * drift ** (len(called) // 2)
    called.append(name)

  def time_all(seconds, drift=1.0, **given):
    calls = {n: functools.partial(run, n, s, drift) for n, s in seconds.items()}
    found = [
      Candidate(name, functools.partial(Call, call), is_baseline=name == 'a')
      for name, call in calls.items()
    ]
    with Hosts() as hosts:
      rows, samples = timing.run(found, {}, hosts, **given)
    return ''.join(called), rows, samples

  return time_all


def test_rounds_alternate_and_ratios_survive_drift(timed):
  seconds = {'a': 2.0, 'b': 1.0}
  called, rows, samples = timed(seconds, 1.5, rounds=6, warmup=2)
  # Each is called once when it is prepared.
  assert called == 'ab' + 'abba' * 4
  # The warm-up does not count.
  np.testing.assert_allclose(samples['a'][:, 0], 2.0 * 1.5 ** np.arange(3, 9))
  found = rows[1]['speedup']
  assert (found.low, found.median, found.high) == pytest.approx((2, 2, 2))


@pytest.mark.parametrize(
  ('given', 'counts'),
  [
    ({'warmup': 1, 'min_seconds': 1.4}, [1, 1, 3, 3]),
    ({'calls': 4}, [1, 4, 4]),
  ],
)
def test_calls_are_repeated_for_as_long_as_asked(timed, given, counts):
  called, _, samples = timed({'a': 0.5}, rounds=2, **given)
  assert samples['a'].tolist() == [[0.5] * counts[-1]] * 2
  assert len(called) == sum(counts)


def candidate(name, **fields):
  return Candidate(name, lambda: Call(lambda: None), **fields)


BASELINE = dict(is_baseline=True, flops=12.0, group='same')
CANDIDATES = [
  candidate('unrolled', over='over_unrolled', **BASELINE),
  candidate('scanned', **BASELINE),
  candidate('engine', flops=6.0, columns={'flops': 5.0}),
  candidate('reading', baseline='engine'),
  candidate('torch', over='over_torch'),
]
SAMPLES = {
  'unrolled': np.array([[0.3], [0.3], [0.3]]),
  # The best by median, though not in every round.
  'scanned': np.array([[0.2], [0.4], [0.2]]),
  # Two calls in each round, of four rows.
  'engine': np.array([[0.3, 0.5], [1.6, 1.6], [0.4, 0.4]]),
  'reading': np.array([[0.01], [0.04], [0.01]]),
}


def test_rows_by_hand():
  calls = {one.name: Call(None) for one in CANDIDATES}
  calls['engine'] = Call(None, rows=4, columns={'device': 'cpu'})
  calls['unrolled'] = Call(None, output=np.array([1.0, 2.0]))
  calls['scanned'] = Call(None, output=np.array([1.0, 2.5]))
  table = timing.rows({'batch': 4}, CANDIDATES, SAMPLES, calls)
  unrolled, scanned, engine, reading = table
  assert [row['candidate'] for row in table] == list(SAMPLES)
  assert {row['batch'] for row in table} == {4}
  assert unrolled['baseline'] == engine['baseline'] == 'scanned'
  assert scanned['speedup'] == Estimate(1.0, 1.0, 1.0)
  # 2, 1 and 2 in the rounds; a ratio of the medians would not be an estimate.
  speedup, seconds = engine['speedup'], engine['seconds']
  assert (seconds.median, seconds.high) == pytest.approx((0.1, 0.25))
  assert (speedup.median, speedup.low) == pytest.approx((2.0, 1.5))
  assert engine['share'] == pytest.approx(1.0)
  fields = [engine[name] for name in ('flops', 'limit', 'device')]
  assert fields == [5.0, 2.0, 'cpu']
  assert 'over_torch' not in engine
  # 3, 0.75 and 3.
  assert engine['over_unrolled'].median == pytest.approx(3.0)
  assert reading['baseline'] == 'engine'
  assert reading['speedup'].median == pytest.approx(10.0)
  assert reading['flops'] is reading['limit'] is None
  assert (unrolled['difference'], scanned['difference']) == (0.0, 0.5)
  with pytest.raises(ValueError, match='no baseline'):
    timing.rows({}, CANDIDATES[2:], SAMPLES, calls)


def work(behaviour=''):
  """A call that says which process it is in, and dies or hangs on demand."""
  print('a library says hello', flush=True)
  np.ones(2**24)
  calls = itertools.count()

  def run():
    if next(calls) < 2:
      return
    if behaviour == 'fails':
      raise MemoryError('out of memory')
    if behaviour == 'dies':
      os._exit(1)
    time.sleep(1000 if behaviour == 'hangs' else 0)

  columns = {'pid': os.getpid(), 'hub': os.environ.get('HF_HUB_OFFLINE')}
  return Call(run, rows=2, output=[1.0], columns=columns)


def resident():
  """Returns the memory of this process in MB, 0 where Linux does not tell."""
  file = pathlib.Path('/proc/self/statm')
  pages = int(file.read_text().split()[1]) if file.exists() else 0
  return pages * os.sysconf('SC_PAGE_SIZE') / 1e6


def in_process(name, process, behaviour='', **fields):
  make = functools.partial(work, behaviour)
  return Candidate(name, make, process=process, **fields)


def test_processes_are_shared_by_name_and_end(capfd, monkeypatch):
  monkeypatch.delenv('HF_HUB_OFFLINE', raising=False)
  names = (('a', 'one'), ('b', 'one'), ('c', 'two'))
  candidates = [in_process(*given, is_baseline=True) for given in names]
  candidates.append(candidate('here'))
  returned = []
  monkeypatch.setattr(
    timing.process, 'return_memory', lambda: returned.append(1)
  )
  with Hosts() as hosts:
    table, _ = timing.run(candidates, {'batch': 2}, hosts, rounds=1)
    first, second, third = (row['pid'] for row in table[:3])
    assert first == second != third != os.getpid()
    # The 134 MB that each took and freed are returned; here before any, too.
    assert hosts.ask('one', resident) - hosts.ask('new', resident) < 64
    assert len(returned) == 2
    assert exists(first)
  assert not exists(first)
  assert not exists(third)
  assert [row['hub'] for row in table[:3]] == ['1'] * 3
  assert 'HF_HUB_OFFLINE' not in os.environ
  assert not {'hello', 'left out'} & {*capfd.readouterr().out.split()}


MAIN = """import os
seen = os.environ.get('HF_HUB_OFFLINE')
def ask():
  return seen
if __name__ == '__main__':
  from benchmarks.timing import Hosts
  with Hosts() as hosts:
    assert (seen, hosts.ask('process', ask)) == (None, '1')
"""


def test_a_process_has_its_environment_before_it_imports_the_main_module(
  tmp_path,
):
  (tmp_path / 'main.py').write_text(MAIN)
  variables = os.environ | {'PYTHONPATH': str(REPOSITORY)}
  variables.pop('HF_HUB_OFFLINE', None)
  command = [sys.executable, tmp_path / 'main.py']
  subprocess.run(command, env=variables, check=True)


@pytest.mark.parametrize(
  ('behaviour', 'message'),
  [
    ('fails', 'left out: two: MemoryError: out of memory'),
    ('dies', 'left out: two: BrokenProcessPool'),
    ('hangs', 'Timeout (0:00:03)!'),
  ],
)
def test_a_lost_process_loses_only_its_own_results(behaviour, message, capsys):
  good = in_process('a', 'one', is_baseline=True)
  rest = [in_process('b', 'two', behaviour), in_process('c', 'two')]
  with Hosts() as hosts:
    # Once both have begun.
    for one in (good, *rest):
      assert hosts.ask(one.process, os.getpid)
    hosts._timeout = 3.0
    for batch in ({'batch': 1}, {'batch': 2}):
      table, _ = timing.run([good, *rest], batch, hosts, rounds=3, warmup=1)
      assert [row['candidate'] for row in table] == ['a']
  printed = capsys.readouterr().out
  assert message in printed
  assert 'a library says hello' in printed or behaviour == 'fails'
  assert printed.count('left out') == 1


def exists(pid):
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True
