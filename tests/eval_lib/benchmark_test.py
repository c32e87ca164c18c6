"""The measuring core: a clock that the test turns, processes that die."""

import functools
import itertools
import os
import time

import numpy as np
import pytest

from eval_lib import benchmark
from eval_lib.benchmark import Call, Candidate, Hosts
from eval_lib.report import Estimate


def drifting():
  """(timers, names called): a machine that is slower every second call."""
  called = []

  def timer(name, seconds):
    def take(calls):
      assert calls == 1
      called.append(name)
      return np.array([seconds * 1.5 ** ((len(called) - 1) // 2)])

    return take

  return {'a': timer('a', 2.0), 'b': timer('b', 1.0)}, called


def test_rounds_are_interleaved_in_alternating_directions():
  timers, called = drifting()
  shares = []
  benchmark.measure(timers, rounds=3, warmup=1, advance=shares.append)
  assert ''.join(called) == 'abba' * 2
  assert shares == [0.25, 0.5, 0.75, 1.0]


def test_ratio_survives_drift_and_warmup_does_not_count():
  samples = benchmark.measure(drifting()[0], rounds=6, warmup=2)
  np.testing.assert_allclose(samples['a'][:, 0], 2.0 * 1.5 ** np.arange(2, 8))
  found = benchmark.ratio(samples, 'a', 'b')
  assert (found.low, found.median, found.high) == pytest.approx((2, 2, 2))


def test_calls_are_repeated_for_as_long_as_asked():
  asked = []

  def take(calls):
    asked.append(calls)
    return np.full(calls, 0.5)

  samples = benchmark.measure({'a': take}, rounds=2, warmup=1, min_seconds=1.4)
  assert asked == [1, 3, 3]
  assert samples['a'].tolist() == [[0.5] * 3] * 2
  benchmark.measure({'a': take}, rounds=2, calls=4)
  assert asked[3:] == [4, 4]


def candidate(name, **fields):
  return Candidate(name, lambda: Call(lambda: None), **fields)


BASELINE = dict(is_baseline=True, flops=(12.0, 12.0), group='same')
CANDIDATES = [
  candidate('unrolled', **BASELINE),
  candidate('scanned', **BASELINE),
  candidate('engine', flops=(6.0, 5.0)),
  candidate('reading', baseline='engine'),
  candidate('torch'),
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
  over = {'over_torch': 'torch', 'over_unrolled': 'unrolled'}
  table = benchmark.rows({'batch': 4}, CANDIDATES, SAMPLES, calls, over)
  unrolled, scanned, engine, reading = table
  assert [row['candidate'] for row in table] == list(SAMPLES)
  assert {row['batch'] for row in table} == {4}
  assert unrolled['baseline'] == engine['baseline'] == 'scanned'
  assert scanned['speedup'] == Estimate(1.0, 1.0, 1.0)
  # 2, 1 and 2 in the rounds; a ratio of the medians would not be an estimate.
  speedup, seconds = engine.pop('speedup'), engine.pop('seconds')
  assert (seconds.median, seconds.high) == pytest.approx((0.1, 0.25))
  assert (speedup.median, speedup.low) == pytest.approx((2.0, 1.5))
  assert engine['share'] == pytest.approx(1.0)
  fields = [engine[name] for name in ('flops', 'limit', 'device', 'over_torch')]
  assert fields == [5.0, 2.0, 'cpu', None]
  # 3, 0.75 and 3.
  assert engine['over_unrolled'].median == pytest.approx(3.0)
  assert reading['baseline'] == 'engine'
  assert reading['speedup'].median == pytest.approx(10.0)
  assert reading['flops'] is reading['limit'] is None
  assert (unrolled['difference'], scanned['difference']) == (0.0, 0.5)
  with pytest.raises(ValueError, match='no baseline'):
    benchmark.rows({}, CANDIDATES[2:], SAMPLES, calls)


def work(behaviour=''):
  """A call that says which process it is in, and dies or hangs on demand."""
  print('a library says hello', flush=True)
  calls = itertools.count()

  def run():
    if next(calls) < 2:
      return
    if behaviour == 'fails':
      raise MemoryError('out of memory')
    if behaviour == 'dies':
      os._exit(1)
    time.sleep(1000 if behaviour == 'hangs' else 0)

  columns = {'pid': os.getpid(), 'variable': os.environ.get('A_VARIABLE')}
  return Call(run, rows=2, output=[1.0], columns=columns)


def in_process(name, process, behaviour='', **fields):
  make = functools.partial(work, behaviour)
  return Candidate(name, make, process=process, **fields)


def test_processes_are_shared_by_name_and_end(capfd):
  names = (('a', 'one'), ('b', 'one'), ('c', 'two'))
  candidates = [in_process(*given, is_baseline=True) for given in names]
  candidates.append(candidate('here'))
  with Hosts(environment={'A_VARIABLE': 'x'}) as hosts:
    table, _ = benchmark.run(candidates, {'batch': 2}, hosts, rounds=1)
    first, second, third = (row['pid'] for row in table[:3])
    assert first == second != third != os.getpid()
    assert exists(first)
  assert not exists(first)
  assert not exists(third)
  assert table[0]['variable'] == 'x'
  assert os.environ.get('A_VARIABLE') is None
  assert not {'hello', 'left out'} & {*capfd.readouterr().out.split()}


@pytest.mark.parametrize(
  ('behaviour', 'message'),
  [
    ('fails', 'left out: two: MemoryError: out of memory'),
    ('dies', 'left out: two: BrokenProcessPool'),
    ('hangs', 'left out: two: no answer in 3 s'),
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
      table, _ = benchmark.run([good, *rest], batch, hosts, rounds=3, warmup=1)
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
