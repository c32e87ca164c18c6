"""Compiler options: the faster is chosen, remembered, and never trusted."""

import json
import threading
import time

import jax
import numpy as np
import pytest

from serve_lib import tuning
from serve_lib.tuning import Tuner

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def lowered(scale=2.0):
  return jax.jit(lambda x: x @ x.T * scale).lower(X)


def choose(monkeypatch, name):
  """Lets a measurement find `name`; returns the list of measurements."""
  measured = []

  def found(programs, arguments, at_once):
    np.testing.assert_array_equal(arguments()[0], X)
    measured.append(sorted(programs))
    return name

  monkeypatch.setattr(tuning, 'fastest', found)
  return measured


@pytest.mark.parametrize('at_once', [1, 2])
def test_the_program_with_the_least_time_is_chosen(at_once):
  made, alone, threads = [], threading.Lock(), set()

  def arguments():
    made.append(0)
    return (X,)

  def blocking(x):  # faster alone, slower with another call beside it
    threads.add(threading.get_ident())
    with alone:
      time.sleep(0.02)
    return x

  programs = {'blocking': blocking, 'steady': lambda x: time.sleep(0.03) or x}
  expected = {1: 'blocking', 2: 'steady'}[at_once]
  assert tuning.fastest(programs, arguments, at_once) == expected
  assert len(threads) == at_once
  # New ones for each call.
  assert len(made) >= 2 * at_once * (1 + tuning.ROUNDS)


def test_a_choice_is_remembered_for_its_program_and_machine(
  monkeypatch, tmp_path
):
  (device, *_), folder = jax.devices(), str(tmp_path / 'programs')
  measured = choose(monkeypatch, 'ynnpack')
  for _ in range(2):
    tuner = Tuner(device, folder, tune=True)
    program = tuner.compile(lowered(), [X])
    np.testing.assert_array_equal(program(X), X @ X.T * 2)
    assert tuner.chosen == {'ynnpack': 1}
  assert measured == [['eigen', 'ynnpack']]
  untuned = Tuner(device, folder, tune=False)
  untuned.compile(lowered(), [X])
  untuned.compile(lowered(3.0), [X])  # another program
  assert untuned.chosen == {'ynnpack': 1, 'eigen': 1}
  monkeypatch.setattr(tuning, 'cores', lambda: 1000)
  Tuner(device, folder, tune=True).compile(lowered(), [X])
  assert len(measured) == 2


@pytest.mark.parametrize('text', ['', '[]', '{"machine": 3', None])
def test_a_damaged_or_foreign_choice_is_measured_again(
  monkeypatch, tmp_path, text
):
  (device, *_), path = jax.devices(), tmp_path / tuning.FILE
  measured = choose(monkeypatch, 'ynnpack')
  Tuner(device, str(tmp_path), tune=True).compile(lowered(), [X])
  if text is None:
    known = json.loads(path.read_text())
    ((machine, choices),) = known.items()
    text = json.dumps({machine: dict.fromkeys(choices, 'unheard of')})
  path.write_text(text)
  Tuner(device, str(tmp_path), tune=True).compile(lowered(), [X])
  assert len(measured) == 2
  assert 'ynnpack' in path.read_text()
