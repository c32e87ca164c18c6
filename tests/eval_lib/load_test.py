"""Load as it comes: arrivals by their moments, servers of a known speed."""

import concurrent.futures
import itertools
import time

import numpy as np
import pytest

from eval_lib import load
from eval_lib.benchmark import Hosts
from eval_lib.load import BatchServer


@pytest.mark.parametrize('burst', load.BURSTS.values())
def test_arrivals_have_their_rate_and_their_bursts(burst):
  times = load.arrivals(50.0, 200_000, burst)
  assert times.shape == (200_000,)
  assert (np.diff(times) >= 0).all()
  assert 200_000 / times[-1] == pytest.approx(50.0, rel=0.03)
  # Rows in intervals of 2 s: the mean is 100, the variance 2 * burst - 1 times.
  counts = np.bincount((times / 2.0).astype(int))[:-1]
  assert counts.mean() == pytest.approx(100.0, rel=0.03)
  assert counts.var() / 100.0 == pytest.approx(2 * burst - 1, rel=0.1)
  # Geometric sizes: a share 1 / burst of the rows begins a burst.
  starts = np.unique(times)
  assert len(starts) / 200_000 == pytest.approx(1 / burst, rel=0.03)
  gaps = np.diff(starts)  # exponential: mean and deviation are equal
  assert gaps.mean() == pytest.approx(burst / 50.0, rel=0.03)
  assert gaps.std() == pytest.approx(burst / 50.0, rel=0.03)


class Clock:
  """Time that passes while a candidate works or the load waits."""

  def __init__(self, monkeypatch):
    self.now = 0.0
    monkeypatch.setattr(load.time, 'perf_counter', lambda: self.now)
    monkeypatch.setattr(load.time, 'sleep', self.sleep)

  def sleep(self, seconds):
    self.now += seconds


class Slow:
  """A server that takes 2 s for each row and blocks its caller."""

  def __init__(self, clock):
    self.clock, self.rows = clock, []

  def submit(self, row):
    self.rows.append(row)
    self.clock.sleep(2.0)
    future = concurrent.futures.Future()
    future.set_result(row)
    return future


def test_latencies_count_from_the_scheduled_time(monkeypatch):
  server = Slow(Clock(monkeypatch))
  found = load.offer(server.submit, 'ab', np.array([0.0, 1.0, 10.0]))
  # The second row is sent at 2 s, and was due at 1 s.
  np.testing.assert_allclose(found, [2.0, 3.0, 2.0])
  assert server.rows == ['a', 'b', 'a']


def test_capacity_rates_percentiles_and_goodput(monkeypatch):
  server = Slow(Clock(monkeypatch))
  with Hosts() as hosts:
    table = load.measure(
      {'slow': ('', lambda: (server, 'ab'))}, hosts,
      loads=(50, 200), seconds=1e3, deadline=4.5, rows=10,
    )  # fmt: skip
  cases = [(row['arrivals'], row['load']) for row in table]
  assert cases == [*itertools.product(('Poisson', 'bursty'), (50, 200))]
  for row in table:
    # Ten rows of 2 s at once, which the first 10 ms precede.
    assert row['capacity'] == pytest.approx(0.5, rel=1e-2)
    rate = row['load'] / 100 * row['capacity']
    burst = load.BURSTS[row['arrivals']]
    times = load.arrivals(rate, round(rate * 1e3), burst)
    end, waits = 0.0, []
    for at in times:  # a queue by hand
      end = max(end, at) + 2.0
      waits.append(end - at)
    for percent in (50, 95, 99):
      expected = np.percentile(waits, percent)
      assert row[f'latency_p{percent}'] == pytest.approx(expected, abs=0.02)
    assert row['rate'] == pytest.approx(len(times) / times[-1])
    kept = np.mean(np.array(waits) <= 4.5)
    assert row['goodput'] == pytest.approx(kept * row['rate'], rel=0.02)
  assert table[0]['latency_p95'] < table[2]['latency_p95']


def test_the_batch_server_takes_what_waits():
  sizes = []

  def work(rows):
    sizes.append(len(rows))
    time.sleep(0.05 if len(sizes) == 1 else 0.0)
    if 'bad' in rows:
      raise ValueError('a bad row')
    return [row * 2 for row in rows]

  server = BatchServer(work, batch=4)
  first = server.submit('a')
  while not sizes:
    time.sleep(0.001)
  futures = [server.submit(f'{number}') for number in range(6)]
  assert first.result() == 'aa'
  assert [one.result() for one in futures] == [f'{n}{n}' for n in range(6)]
  assert sizes == [1, 4, 2]
  with pytest.raises(ValueError, match='a bad row'):
    server.submit('bad').result()
  assert server.submit('b').result() == 'bb'


def test_the_picture_has_a_line_for_each_candidate(made, assert_readable):
  row = dict(arrivals='Poisson', load=50, capacity=2.0, latency_p95=0.1)
  table = [
    row | dict(arrivals=kind, candidate=name, rate=rate, goodput=rate / 2)
    for kind in load.BURSTS for name in ('EAT', 'dense') for rate in (1.0, 2.0)
  ]  # fmt: skip
  load.draw('load', table)
  [figure] = made
  assert [len(axes.get_lines()) for axes in figure.axes] == [2] * 4
  assert_readable(figure, 12)
