"""Answers in the order of their items, from a source that takes its time."""

import concurrent.futures
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_END = object()


def in_order(
  items: Iterable[Any],
  submit: Callable[[Any], concurrent.futures.Future],
  window: int,
) -> Iterator[Any]:
  """Submits items in a thread of its own and yields their results in order.

  Left early, it waits for the source to give the item it is being asked for.

  Args:
    items: the source; its exceptions come out behind the earlier results.
    submit: gives a future for an item.
    window: items submitted whose result has not been taken.
  """
  room = threading.Semaphore(window)
  left = threading.Event()
  futures: queue.SimpleQueue[Any] = queue.SimpleQueue()

  def read() -> None:
    try:
      source = iter(items)
      while True:
        room.acquire()
        item = _END if left.is_set() else next(source, _END)
        futures.put(_END if item is _END else submit(item))
        if item is _END:
          return
    except BaseException as error:
      futures.put(error)

  reader = threading.Thread(target=read, name='serve_lib stream')
  reader.start()
  try:
    while (future := futures.get()) is not _END:
      if isinstance(future, BaseException):
        raise future
      yield future.result()
      room.release()
  finally:
    left.set()
    room.release()
    reader.join()
