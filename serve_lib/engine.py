"""The adaptive engine: rows exit individually; batches are refilled.

  with Engine(chain, policy, lengths=(32, 64, 128)) as engine:
    answers = engine.predict(items)

A row leaves after the first stage whose outputs satisfy the policy. Remaining
rows of several batches are joined on the device (`serve_lib.pool`);
`serve_lib.worker` chooses the next batch.
"""

import atexit
import concurrent.futures
import queue
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import numpy as np
from absl import logging
from annotated_types import Interval

from core import fields
from core.errors import ConfigError
from serve_lib import process
from serve_lib.chain import (
  Chain,
  Failure,
  Grid,
  InputError,
  Policy,
  Resizable,
  Row,
)
from serve_lib.pool import RequestQueue
from serve_lib.programs import Programs, WarmUp
from serve_lib.turns import Flow
from serve_lib.worker import Worker

Backend = Literal['auto', 'xla', 'onnxruntime']
Rows = Annotated[int, Interval(ge=1, le=10**7)]
_END = object()


class _Local(threading.local):
  encodes = False  # True within `encode`


class Engine:
  """Serves a chain to any number of threads.

  Args:
    chain: the model; its variables are on one device.
    policy: encodes, decides, answers.
    lengths: length buckets, ascending; longer rows are refused.
    batches: batch buckets, ascending; more pad less, fewer compile faster.
    max_pending: `submit` blocks while that many rows have no answer yet.
    max_wait: seconds that a partial batch may wait while the device is busy.
    ahead: number of batches in flight beyond the one being computed; on a CPU
      they are computed at the same time. Only full batches go ahead.
    max_pool_bytes: soft limit of the device memory of rows between stages. Near
      it partial batches run early; one batch is always allowed. 0: no limit.
    cache_directory: for compiled programs, '' for none. The programs are
      executed, so no other user may be able to write there.
    lazy: compile programs when they are first needed, not in `warm_up`.
    backend: what runs the stages. On a CPU 'auto' is ONNX Runtime where it is
      installed and can run the chain. It takes all sizes up to the largest of
      `lengths` and `batches`; `ahead` and `cache_directory` have no effect.
  """

  def __init__(
    self,
    chain: Chain,
    policy: Policy,
    lengths: Sequence[int],
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
    *,
    max_pending: Rows = 1024,
    max_wait: Annotated[float, Interval(ge=0.0, le=3600.0)] = 0.001,
    ahead: Annotated[int, Interval(ge=0, le=8)] = 1,
    max_pool_bytes: Annotated[int, Interval(ge=0, le=2**60)] = 0,
    cache_directory: str = '',
    lazy: bool = False,
    backend: Backend = 'auto',
  ):
    limits: dict[str, Any] = dict(
      max_wait=max_wait, ahead=ahead, max_pool_bytes=max_pool_bytes
    )
    hints = Engine.__init__.__annotations__
    for name, value in {'max_pending': max_pending, **limits}.items():
      fields.check_value(f'engine.{name}', value, hints[name])
    grid = Grid(tuple(lengths), tuple(batches))
    self.monitor = policy.monitor
    # Of reading any item, see `serve_lib.items.Reader.WORK`.
    self.item_work = getattr(getattr(policy, 'reader', None), 'WORK', 0)
    self.policy = policy
    self._programs = _onnx_stages(chain, grid, backend, lazy) or Programs(
      chain, grid, lazy=lazy, cache_directory=cache_directory
    )
    self.grid, self.backend = self._programs.grid, self._programs.backend
    limits['ahead'] = min(ahead, self._programs.max_ahead)
    self._requests = RequestQueue(max_pending)
    self._worker = Worker(policy, self._programs, self._requests, limits)
    self._threads = [
      threading.Thread(
        target=self._worker.run, name='serve_lib engine', daemon=True
      )
      for _ in range(self._worker.num_threads)
    ]
    self._is_lazy = lazy
    self._warm_up: Any = None
    self._local = _Local()

  def __enter__(self) -> 'Engine':
    self.warm_up()
    return self

  def __exit__(self, error_type: Any, *rest: object) -> None:
    self.close(drain=error_type is None)

  def warm_up(self, progress: bool = False, threads: int = 1) -> WarmUp:
    """Compiles every program at the first call; `progress` goes to stderr."""
    if self._warm_up is None:
      warm_up = self._programs.compile(progress, threads)
      if process.OWNED.is_set() and not self._is_lazy:
        process.collapse_pages()
      for thread in self._threads:
        thread.start()
      self._warm_up = warm_up
      # The threads stop when the engine is garbage-collected or the interpreter
      # exits: no XLA program may run while Python exits.
      weakref.finalize(self, self._requests.close, cancel=False)
      atexit.register(_finish, self._requests, self._threads)
    return self._warm_up

  def predict(self, items: Iterable[Any]) -> list[Any]:
    """Returns the answers in the order of items; a `Failure` for bad ones."""
    self._check_call('predict', items)
    return [future.result() for future in self.submit_all(list(items))]

  def submit(
    self, item: Any, timeout: float | None = None
  ) -> concurrent.futures.Future:
    """Accepts one item; its future gives the answer or a `Failure`.

    A row whose future is cancelled frees its room and is not computed further.
    Raises OverloadedError if `max_pending` rows were pending for `timeout`
    seconds, ClosedError if the engine is closed.
    """
    return self.submit_all([item], timeout)[0]

  def submit_all(
    self,
    items: Sequence[Any],
    timeout: float | None = None,
    flow: Flow | None = None,
  ) -> list[concurrent.futures.Future]:
    """Accepts items as `submit` does; after an error some may be accepted.

    Calls take turns; all calls of one `flow` count as one.
    """
    flow = flow or Flow(len(items))
    if self._warm_up is None:
      raise RuntimeError(
        'the engine has not compiled its programs: call warm_up() first, or '
        "use it as a context ('with Engine(...) as engine')"
      )
    if self._blocks_itself():
      timeout = 0.0
    futures: list[concurrent.futures.Future] = []
    announced = 0
    try:
      while wanted := len(items) - len(futures):
        room = self._requests.reserve(min(wanted, self.grid.capacity), timeout)
        some = items[len(futures) :][:room]
        # Announces how many items follow: a partial batch waits for them.
        more = wanted - room - announced
        futures += self._enqueue(some, more, flow)
        announced = wanted - room
    finally:
      if announced:
        self._requests.expect(-announced)
    return futures

  def stream(self, items: Iterable[Any], window: int = 256) -> Iterator[Any]:
    """Yields the answers in the order of the items while these arrive.

    A daemon thread reads and submits at most `window` items ahead, and one more
    after the caller has stopped. Exceptions of the source are raised after the
    answers to the items before. (Read standard input from `open(0, 'rb',
    closefd=False)`: Python aborts if `sys.stdin` is locked at exit.)
    """
    fields.check_value('stream.window', window, Rows)
    self._check_call('stream', items)
    return self._stream(items, window)

  def _stream(self, items: Iterable[Any], window: int) -> Iterator[Any]:
    room = threading.Semaphore(window)
    left = threading.Event()
    futures: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
      try:
        source = iter(items)
        while room.acquire() and not left.is_set():
          item = next(source, _END)
          if item is _END or left.is_set():
            break
          futures.put(self.submit(item))
          del item  # frees it while the next is awaited
        futures.put(_END)
      except BaseException as error:
        futures.put(error)

    reader = threading.Thread(target=read, name='serve_lib stream', daemon=True)
    reader.start()
    try:
      while isinstance(future := futures.get(), concurrent.futures.Future):
        yield future.result()
        del future
        room.release()
      reader.join()
      if future is not _END:
        raise future
    finally:
      future = None  # the traceback of an error would hold this frame
      left.set()
      room.release()

  def close(self, drain: bool = True) -> None:
    """Ends the engine; may be called again, and from any thread.

    Without `drain` accepted items fail with `ClosedError`, except items of
    batches in flight that leave now.
    """
    self._requests.close(cancel=not drain)
    if self._warm_up and threading.current_thread() not in self._threads:
      for thread in self._threads:
        thread.join()

  def status(self) -> dict[str, int]:
    """Returns the rows and bytes that the engine holds, and their maxima."""
    requests, pool = self._requests, self._worker.pool
    queued = requests.rows()
    return {
      'pending': requests.pending,
      'peak_pending': requests.peak_pending,
      'queued_rows': len(queued),
      'queue_bytes': sum(row.bytes for row in queued),
      'pooled_rows': sum(map(len, pool.groups.values())),
      'pool_bytes': pool.bytes,
      'peak_pool_bytes': pool.peak_bytes,
      'copies': pool.copies,
    }

  def _check_call(self, method: str, items: Any) -> None:
    """Rejects a single item (it would be iterated) and calls that deadlock."""
    if isinstance(items, (str, bytes, bytearray, Mapping)):
      raise TypeError(
        f'engine.{method}: expected several items, as in a list, got one '
        f'{type(items).__name__}; submit(item) takes one'
      )
    if self._blocks_itself():
      raise RuntimeError(
        f'engine.{method}: called in a callback, by the thread that answers, '
        'or within encode: it would block itself; use submit()'
      )

  def _blocks_itself(self) -> bool:
    """Returns True in a thread that others need in order to free room."""
    is_worker = threading.current_thread() in self._threads
    return is_worker or self._local.encodes

  def _enqueue(
    self, items: Sequence[Any], expected: int, flow: Flow
  ) -> list[concurrent.futures.Future]:
    """Encodes and queues items; adds `expected` to the announced items."""
    futures = [concurrent.futures.Future[Any]() for _ in items]
    for future in futures:
      future.add_done_callback(self._requests.release)
    try:
      rows = [row for row in map(self._encode, items, futures) if row]
      self._requests.put(rows, expected, flow)
    except BaseException:
      for future in futures:
        future.cancel()
      raise
    return futures

  def _encode(self, item: Any, future: concurrent.futures.Future) -> Row | None:
    """Returns the row of an item; None if it is answered with a failure."""
    now, handled = time.monotonic(), sys.exception()
    outer = self._local.encodes
    self._local.encodes = True
    try:
      encoded = self.policy.encode(item)
      variants = self._programs.chain.variants
      if encoded.variant not in variants:
        raise InputError(
          f'variant: expected one of {variants}, got {encoded.variant!r}'
        )
      length = self.grid.fit_length(encoded.length)
      count = sum(np.asarray(x).nbytes for x in encoded.inputs.values())
      return Row(encoded, length, future, now, now, count)
    except Exception as error:
      self.monitor.record_failure('encode')
      future.set_result(Failure.of(error, 'encode', handled))
      return None
    finally:
      self._local.encodes = outer


def _onnx_stages(chain: Any, grid: Grid, backend: Backend, lazy: bool) -> Any:
  """Returns the chain in ONNX Runtime, or None; see `Engine`.

  Raises ConfigError if it cannot run there, and has to.
  """
  if backend == 'xla':
    return None
  if not isinstance(chain, Resizable):
    why = 'the stages of the model are of fixed lengths'
  elif jax.default_backend() != 'cpu':
    why = 'the model is not on a CPU'
  else:
    try:
      from serve_lib.onnx import graph, program

      return program.OnnxStages(chain, grid, lazy)
    except ImportError:
      why = "onnx and onnxruntime are missing (pip install '.[serve]')"
    except graph.NotTranslatedError as error:
      why = f'there is no translation for {error}'
      if backend == 'auto':
        logging.warning('the engine runs in XLA, as %s', why)
  if backend == 'onnxruntime':
    expected = f"'auto' or 'xla', as {why}"
    raise ConfigError('engine.backend', backend, expected)
  return None


def _finish(
  requests: RequestQueue, threads: Sequence[threading.Thread]
) -> None:
  requests.close(cancel=False)
  for thread in threads:
    thread.join()
