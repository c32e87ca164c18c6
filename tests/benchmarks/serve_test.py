"""Load as it comes: arrivals by their moments, servers of a known speed."""

import concurrent.futures
import functools
import itertools

import numpy as np
import pytest

from benchmarks import serve
from benchmarks.timing import Hosts


@pytest.mark.parametrize('burst', serve.BURSTS.values())
def test_arrivals_have_their_rate_and_their_bursts(burst):
  times = serve.arrivals(50.0, 200_000, burst)
  assert times.shape == (200_000,)
  assert (np.diff(times) >= 0).all()
  # Rows in intervals of 2 s: the mean is 100, the variance 2 * burst - 1 times.
  counts = np.bincount((times / 2.0).astype(int))[:-1]
  assert counts.mean() == pytest.approx(100.0, rel=0.03)
  assert counts.var() / 100.0 == pytest.approx(2 * burst - 1, rel=0.1)
  # Geometric sizes: a share 1 / burst of the rows begins a burst.
  starts = np.unique(times)
  assert len(starts) / 200_000 == pytest.approx(1 / burst, rel=0.03)
  # Exponential gaps: mean and deviation are equal.
  assert np.diff(starts).std() == pytest.approx(burst / 50.0, rel=0.03)


class Slow:
  """A server that takes 2 s of its own time and blocks its caller."""

  def __init__(self, monkeypatch):
    self.now, self.sent = 0.0, []
    monkeypatch.setattr(serve.time, 'perf_counter', lambda: self.now)
    monkeypatch.setattr(serve.time, 'sleep', self.sleep)

  def sleep(self, seconds):
    self.now += seconds

  def submit(self, row):
    self.sent.append(row)
    self.sleep(2.0)
    future = concurrent.futures.Future()
    future.set_result(row)
    return future


@pytest.fixture
def slow(monkeypatch):
  return Slow(monkeypatch)


def test_latencies_count_from_the_scheduled_time(slow):
  found = serve.offer(slow.submit, 'ab', np.array([0.0, 1.0, 10.0]))
  # The second row is sent at 2 s, and was due at 1 s.
  np.testing.assert_allclose(found, [2.0, 3.0, 2.0])
  assert slow.sent == ['a', 'b', 'a']


def test_a_library_runs_the_rows_that_are_due(slow):
  times = np.array([0.0, 0.5, 1.0, 1.5, 10.0])
  found = serve.offer_batches(slow.submit, 2, 'abc', times)
  # Batches start at 0, 2, 4 and 10 s; of the three due at 2 s two fit.
  np.testing.assert_allclose(found, [2.0, 3.5, 3.0, 4.5, 2.0])
  assert slow.sent == [['a'], ['b', 'c'], ['a'], ['b']]


def test_capacity_rates_percentiles_and_goodput(slow):
  servers = {'slow': ('', functools.partial(serve.offer, slow.submit, 'ab'))}
  line = (
    '--workdir=w --dense=d --loads=50,200 --seconds=1000 --deadline_ms=4500'
  )
  with Hosts() as hosts:
    table = serve.measure(servers, hosts, 10, serve.main.parse(line.split()))
  cases = [(row['arrivals'], row['load']) for row in table]
  assert cases == [*itertools.product(('Poisson', 'bursty'), (50, 200))]
  for row in table:
    # Ten rows of 2 s at once, which the first 10 ms precede.
    assert row['capacity'] == pytest.approx(0.5, rel=1e-2)
    rate = row['load'] / 100 * row['capacity']
    burst = serve.BURSTS[row['arrivals']]
    times = serve.arrivals(rate, round(rate * 1e3), burst)
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


def test_the_picture_has_a_line_for_each_candidate(made, assert_readable):
  row = dict(arrivals='Poisson', load=50, capacity=2.0, latency_p95=0.1)
  table = [
    row | dict(arrivals=kind, candidate=name, rate=rate, goodput=rate / 2)
    for kind in serve.BURSTS for name in ('EAT', 'dense') for rate in (1.0, 2.0)
  ]  # fmt: skip
  serve.draw('load', table)
  [figure] = made
  assert [len(axes.get_lines()) for axes in figure.axes] == [2] * 4
  assert_readable(figure, 12)
