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

  Left early, also by Ctrl-C, it waits for nothing: the source may be asked for
  one more item, which is dropped. The thread is a daemon, so a source that
  never gives another cannot keep the program from ending. (One that reads
  standard input opens a file of its own, `open(0, 'rb', closefd=False)`:
  Python aborts if the lock of `sys.stdin` is taken when it ends.)

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
        if item is _END or left.is_set():
          futures.put(_END)
          return
        futures.put(submit(item))
        del item  # it is not held while the next is waited for
    except BaseException as error:
      futures.put(error)

  reader = threading.Thread(target=read, name='serve_lib stream', daemon=True)
  reader.start()
  try:
    while isinstance(future := futures.get(), concurrent.futures.Future):
      yield future.result()
      del future  # nor an answer
      room.release()
    reader.join()
    if future is not _END:
      raise future
  finally:
    future = None  # it may be an error, whose traceback holds this frame
    left.set()
    room.release()
