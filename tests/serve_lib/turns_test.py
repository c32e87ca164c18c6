"""Turns: who has been given least is next; what is cancelled leaves."""

import asyncio
import os
import sys

import pytest

from serve_lib import turns

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(('places', 'costs', 'expected'), [
  # Flows with the costs of what they take, one after the other.
  (1, {'a': [1] * 4, 'b': [1]}, 'abaaa'),
  (1, {'a': [1] * 3, 'b': [1] * 3}, 'ababab'),
  (4, {'a': [4] * 2, 'b': [1] * 3}, 'ababb'),
  (2, {'a': [9, 9], 'b': [1]}, 'aba'),  # at most all places
])  # fmt: skip
async def test_flows_take_turns(places, costs, expected):
  line, order = turns.Turns(places), []
  await line.take(turns.Flow(), places)

  async def use(name, each):
    flow = turns.Flow()
    for cost in each:
      await line.take(flow, cost)
      order.append(name)
      await asyncio.sleep(0)
      line.free(cost)

  tasks = [asyncio.create_task(use(*pair)) for pair in costs.items()]
  await asyncio.sleep(0)
  line.free(places)
  await asyncio.gather(*tasks)
  assert ''.join(order) == expected
  assert line.taken == 0


async def test_new_flows_use_a_reserve_but_not_for_ever():
  line, order, tasks = turns.Turns(8, 2), [], []
  large = turns.Flow()
  await line.take(large, 2)
  await line.take(large, 4)
  task = asyncio.create_task(line.take(large, 2))
  for _ in range(100):  # a new flow each
    tasks.append(asyncio.create_task(line.take(turns.Flow(), 1)))
    await asyncio.sleep(0)
    order.append(tasks[-1].done())
    line.free(1)
    if task.done():
      break
  assert order[:3] == [True] * 3
  assert 3 < len(order) < 30
  await asyncio.gather(*tasks)


async def test_a_cancelled_turn_holds_nothing():
  line = turns.Turns(2)
  await line.take(turns.Flow(), 1)
  large, small, last = (
    asyncio.create_task(line.take(turns.Flow(), cost)) for cost in (2, 1, 1)
  )
  await asyncio.sleep(0)
  large.cancel()
  await small
  line.free(1)
  last.cancel()  # after it was given its place
  await asyncio.gather(large, last, return_exceptions=True)
  assert line.taken == 1


async def test_a_lane_frees_its_places_when_the_thread_ends():
  ended = []
  lane = turns.Lane(1, 1, lambda: ended.append(True))
  assert await lane.run(turns.Flow(), 5, max, 2, 3) == 3
  with pytest.raises(ZeroDivisionError):
    await lane.run(turns.Flow(), 1, divmod, 1, 0)
  await asyncio.sleep(0.01)
  assert (lane.taken, len(ended)) == (0, 2)
  lane.close()


@pytest.mark.skipif(sys.platform != 'linux', reason='threads have no priority')
async def test_work_yields_to_the_event_loop_while_it_should():
  shared, own = [], os.nice(0)  # of this process, 19 at most
  lane = turns.Lane(1, 1, yields=lambda: bool(shared))
  for expected in (own, min(own + 10, 19)):
    assert await lane.run(turns.Flow(), 1, os.nice, 0) == expected
    shared.append(True)
  lane.close()
