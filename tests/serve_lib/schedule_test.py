"""Buckets, and the choice of the next batch, rule by rule."""

import collections

import pytest

from dataset_lib.errors import ConfigError
from serve_lib.chain import InputError
from serve_lib.schedule import Grid, Key, Waiting, choose, doubling


def waiting(stage, rows, since, length=8, variant='full'):
  return Waiting(Key(stage, variant, length), rows, since)


def chosen(entries, *, now=10.0, max_wait=5.0, busy=False, crowded=False):
  return choose(
    entries,
    capacity=4,
    now=now,
    max_wait=max_wait,
    busy=busy,
    crowded=crowded,
  )


LONE = waiting(0, 1, 9.0)
FULL = waiting(0, 9, 9.5, length=16)
DEEP = waiting(2, 2, 8.0)
MIDDLE = waiting(1, 3, 9.0)
LATE = waiting(1, 1, 4.0, length=32)
LATER = waiting(0, 4, 4.5, length=32)


@pytest.mark.parametrize(
  ('entries', 'expected'),
  [
    ([], None),
    ([LONE], LONE),
    ([DEEP], DEEP),
    ([DEEP, LONE, MIDDLE], LONE),  # shallow first, it may fill the others
    ([DEEP, MIDDLE], MIDDLE),
    ([DEEP, LONE, FULL], FULL),
    ([FULL, waiting(0, 4, 9.4)], waiting(0, 4, 9.4)),  # the older one
    ([DEEP, FULL, LATER, LATE], LATE),
    ([DEEP, FULL, LATER], LATER),
  ],
)
def test_the_order_of_choice(entries, expected):
  for order in (entries, entries[::-1]):
    assert chosen(order) == (expected and expected.key)


@pytest.mark.parametrize(
  ('entries', 'expected'),
  [
    ([LONE, DEEP], None),
    ([LONE, FULL], FULL),
    ([LATE, FULL], None),  # drains, so that the late one is next
    ([LATER, FULL], LATER),
  ],
)
def test_while_the_device_is_busy_only_full_batches(entries, expected):
  assert chosen(entries, busy=True) == (expected and expected.key)


def test_a_crowded_pool_runs_what_waited_longest_in_it():
  assert chosen([FULL, MIDDLE, DEEP], crowded=True) == DEEP.key
  assert chosen([FULL], crowded=True) == FULL.key


@pytest.mark.parametrize('max_wait', [0.0, 3.0, 1000.0])
def test_no_row_starves_in_an_endless_backlog(max_wait):
  """A rare pooled row among queues that stay full."""
  capacity, backlog = 4, 40
  rare = Key(1, 'full', 99)
  queue = collections.deque([0.0] * backlog)  # when each row came
  now = 1.0
  rounds = 0
  while True:
    entries = [Waiting(rare, 1, 1.0), Waiting(Key(0, 'full', 8), 40, queue[0])]
    key = choose(
      entries, capacity=capacity, now=now, max_wait=max_wait, busy=False
    )
    if key == rare:
      break
    now += 1.0
    rounds += 1
    for _ in range(capacity):
      queue.popleft()
      queue.append(now)
    assert rounds < 2000
  # The rows before the rare one, or `max_wait`.
  assert rounds <= max(backlog / capacity, max_wait) + 1


def test_buckets():
  grid = Grid((8, 16), (1, 4, 6))
  assert [grid.fit_length(n) for n in (1, 8, 9, 16)] == [8, 8, 16, 16]
  assert [grid.fit_rows(n) for n in (1, 2, 4, 5, 6)] == [1, 4, 4, 6, 6]
  for length in (0, 17):
    with pytest.raises(InputError, match='expected 1 to 16'):
      grid.fit_length(length)


@pytest.mark.parametrize('sizes', [(), (4, 2), (2, 2), (0,)])
def test_illegal_buckets_are_named(sizes):
  with pytest.raises(ConfigError, match=r'engine.lengths: expected a tuple of'):
    Grid(sizes, (1,))


@pytest.mark.parametrize(
  ('largest', 'expected'),
  [(1, (1,)), (12, (1, 2, 4, 8, 12)), (16, (1, 2, 4, 8, 16))],
)
def test_doubling_ends_with_the_largest(largest, expected):
  assert doubling(largest) == expected
