"""The pool against a list of rows, with copies that are plain NumPy."""

import concurrent.futures

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_lib.chain import Encoded, Row
from serve_lib.pool import Batch, Pool
from serve_lib.programs import Programs
from serve_lib.schedule import Grid, Key

CAPACITY = 4
KEY = Key(1, 'full', 8)


class Copies(Programs):
  """On NumPy arrays; a pool that was given away is overwritten."""

  def __init__(self):
    self.row_bytes = {KEY: 10, Key(2, 'full', 8): 7}
    self._moving, self._grid = set(), Grid((8,), (1, 2, CAPACITY))

  def copy(self, kind, key, size, *arrays):
    return getattr(self, kind)(size, *arrays)

  def open(self, size, carry, source):
    assert len(carry) == size
    return carry[source]

  def join(self, size, pool, carry, places):
    assert len(carry) == size
    new = pool.copy()
    for value, place in zip(carry, places, strict=True):
      if place < CAPACITY:
        new[place] = value
    pool[:] = -1
    return new

  def cut(self, size, pool):
    return pool[:size]


def row(value):
  encoded = Encoded({}, 1, 'full', value)
  return Row(encoded, 8, concurrent.futures.Future(), 0.0, float(value))


def values_of(rows):
  return [row.encoded.context for row in rows]


def batch_of(values, size, slots, key=KEY):
  carry = np.full(size, 99)
  carry[slots] = values
  rows = [row(value) for value in values]
  return Batch(key, size, rows, np.array(slots, np.int32), carry)


def check(batch):
  """Every row's value is where the batch says it is."""
  assert len(batch.carry) == batch.size
  values = values_of(batch.rows)
  assert batch.carry[batch.slots].tolist() == values
  return values


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_rows_come_out_in_the_order_they_came_in(data):
  pool = Pool(Copies(), Grid((8,), (1, 2, 4)))
  expected, got, counter = [], [], 0
  for _ in range(data.draw(st.integers(1, 10))):
    size = data.draw(st.sampled_from((1, 2, 4)))
    slots = data.draw(
      st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True)
    )
    values = list(range(counter, counter + len(slots)))
    counter += len(slots)
    expected += values
    full = pool.add(batch_of(values, size, sorted(slots)))
    if full is not None:
      assert len(full.rows) == full.size == CAPACITY
      got += check(full)
    assert pool.rows == len(expected) - len(got) < CAPACITY
    if KEY in pool and data.draw(st.booleans()):
      batch = pool.take(KEY)
      assert batch.size == {1: 1, 2: 2, 3: 4}[len(batch.rows)]
      got += check(batch)
  if KEY in pool:
    got += check(pool.take(KEY))
  assert got == expected


def test_free_slots_hold_a_row_that_is_done():
  pool = Pool(Copies(), Grid((8,), (1, 2, 4)))
  pool.add(batch_of([5, 6, 7], 4, [0, 1, 3]))
  assert pool.take(KEY).carry.tolist() == [5, 6, 7, 99]  # row 2 has left
  pool.add(batch_of([5], 1, [0]))
  assert pool.take(KEY).carry.tolist() == [5]


def test_what_waits_and_how_much_memory_it_takes():
  pool = Pool(Copies(), Grid((8,), (1, 2, 4)))
  pool.add(batch_of([5, 6], 2, [0, 1]))
  pool.add(batch_of([7], 1, [0], Key(2, 'full', 8)))
  assert [tuple(entry) for entry in pool.waiting()] == [
    (KEY, 2, 5.0),
    (Key(2, 'full', 8), 1, 7.0),
  ]
  assert pool.bytes == pool.peak_bytes == CAPACITY * (10 + 7)
  assert values_of(pool.clear()) == [5, 6, 7]
  assert pool.bytes == pool.rows == 0
  assert pool.peak_bytes == CAPACITY * (10 + 7)


def test_no_row_is_out_of_reach_when_a_copy_fails(monkeypatch):
  pool = Pool(Copies(), Grid((8,), (1, 2, 4)))
  pool.add(batch_of([0, 1, 2], 4, [0, 1, 2]))

  def broken(*arguments):
    raise MemoryError

  monkeypatch.setattr(Copies, 'open', broken)  # for the rows left over
  with pytest.raises(MemoryError):
    pool.add(batch_of([3, 4], 2, [0, 1]))
  assert values_of(pool.discard(KEY)) == [0, 1, 2]
  monkeypatch.undo()
  pool.add(batch_of([0, 1], 4, [0, 1]))
  monkeypatch.setattr(Copies, 'cut', broken)
  with pytest.raises(MemoryError):
    pool.take(KEY)
  assert values_of(pool.discard(KEY)) == [0, 1]
  assert pool.discard(KEY) == []
