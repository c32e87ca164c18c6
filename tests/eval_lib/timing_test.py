"""Timing with a clock that the test turns: no machine decides the outcome."""

import jax.numpy as jnp
import numpy as np
import pytest

from eval_lib import timing


class Clock:
  """Every call of `work` takes `seconds`, times a drift of the machine."""

  def __init__(self):
    self.now = 0.0
    self.drift = 1.0
    self.calls = []

  def __call__(self):
    return self.now

  def work(self, name, seconds):
    def call():
      self.calls.append(name)
      self.now += seconds * self.drift
      if len(self.calls) % 2 == 0:
        self.drift *= 1.5
      return jnp.zeros(())

    return call


def test_rounds_are_interleaved_in_alternating_directions():
  clock = Clock()
  functions = {'a': clock.work('a', 2.0), 'b': clock.work('b', 1.0)}
  timing.measure(functions, repeats=3, warmup=1, clock=clock)
  assert ''.join(clock.calls) == 'abba' * 2


def test_ratio_survives_drift_and_warmup_does_not_count():
  clock = Clock()
  functions = {'a': clock.work('a', 2.0), 'b': clock.work('b', 1.0)}
  timings = timing.measure(functions, repeats=6, warmup=2, clock=clock)
  assert len(timings.seconds['a']) == len(timings.seconds['b']) == 6
  np.testing.assert_allclose(
    timings.seconds['a'], 2.0 * 1.5 ** np.arange(2, 8), rtol=1e-9
  )
  ratio = timings.ratio('a', 'b')
  assert (ratio.low, ratio.median, ratio.high) == pytest.approx((2, 2, 2))


@pytest.mark.parametrize(
  'arguments',
  [
    dict(functions={}),
    dict(functions={'a': int}, repeats=0),
    dict(functions={'a': int}, warmup=-1),
  ],
)
def test_nothing_to_time_is_an_error(arguments):
  with pytest.raises(ValueError, match=r'timing.measure: expected'):
    timing.measure(**arguments)
