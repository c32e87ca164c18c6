"""The adaptive engine: every row pays for its own depth, in full batches.

  with Engine(chain, policy, lengths=(32, 64, 128)) as engine:
    answers = engine.predict(items)

A row leaves as soon as its policy is satisfied and nobody waits for the least
confident one: after each stage the undecided rows are compacted on the device
into a smaller batch, where rows of other batches join them (`serve_lib.pool`);
`serve_lib.schedule` says what runs next. Everything is compiled before the
first request.
"""

import concurrent.futures
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dataset_lib.fields import check_field, integer, real
from serve_lib import stream
from serve_lib.buckets import Grid
from serve_lib.chain import Chain, Failure, InputError, Policy, Row
from serve_lib.intake import Intake
from serve_lib.monitor import Monitor
from serve_lib.persistent_cache import persistent_cache
from serve_lib.programs import Programs, WarmUp
from serve_lib.worker import Worker

FIELDS = {
  'max_pending': integer(1, 10**7),
  'max_wait': real(0.0, 3600.0),
  'ahead': integer(0, 8),
  'max_pool_bytes': integer(0, 2**60),
}


class Engine:
  """Serves a chain to any number of threads.

  Args:
    chain: the model; its variables are on one device.
    policy: encodes, decides, answers.
    lengths: length buckets, ascending; longer rows are refused.
    batches: batch buckets, ascending.
    max_pending: rows accepted and not answered; who brings more is blocked.
    max_wait: seconds that rows wait in one place for company while there is
      other work; without other work nobody waits.
    ahead: full batches dispatched before the outputs of the last are read.
    max_pool_bytes: device memory of the rows that wait between stages; near
      the limit they run without waiting for company. At least one batch
      waits whatever it takes. 0 for no limit but the worst case that `WarmUp`
      tells.
    cache_directory: where compiled programs are kept for the next process;
      '' for nowhere. Keep it private: what is in there is run.
    monitor: where the running statistics are kept; None for that of the
      policy, `policy.monitor`, or a new one if it has none.
    device: where to run; None for where the variables are.

  Raises:
    ConfigError: an argument is out of range.
  """

  def __init__(
    self,
    chain: Chain,
    policy: Policy,
    lengths: Sequence[int],
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
    *,
    max_pending: int = 1024,
    max_wait: float = 0.02,
    ahead: int = 1,
    max_pool_bytes: int = 0,
    cache_directory: str = '',
    monitor: Monitor | None = None,
    device: Any = None,
  ):
    given = dict(
      max_pending=max_pending,
      max_wait=max_wait,
      ahead=ahead,
      max_pool_bytes=max_pool_bytes,
    )
    for name, field in FIELDS.items():
      check_field(f'engine.{name}', given[name], field)
    self.grid = Grid(tuple(lengths), tuple(batches))
    self.monitor = monitor or getattr(policy, 'monitor', None) or Monitor()
    self._chain, self._policy = chain, policy
    self._cache_directory = cache_directory
    self._programs = Programs(chain, self.grid, device)
    self._intake = Intake(max_pending)
    self._worker = Worker(
      chain,
      policy,
      self.grid,
      self._programs,
      self._intake,
      self.monitor,
      max_wait=max_wait,
      ahead=ahead,
      max_pool_bytes=max_pool_bytes,
    )
    self._thread: threading.Thread | None = None
    self._warm_up: WarmUp | None = None

  def __enter__(self) -> 'Engine':
    self.warm_up()
    return self

  def __exit__(self, error_type: Any, *rest: object) -> None:
    self.close(drain=error_type is None)

  def warm_up(self, progress: bool = False, threads: int = 1) -> WarmUp:
    """Compiles every program; once, however often it is called.

    Args:
      progress: show a bar on stderr.
      threads: programs compiled at a time.
    """
    if self._warm_up is None:
      with persistent_cache(self._cache_directory):
        self._warm_up = self._programs.compile(progress, threads)
    return self._warm_up

  def predict(self, items: Iterable[Any]) -> list[Any]:
    """Answers in the order of the items; a `Failure` for each that fails.

    Raises:
      ClosedError: the engine was closed before all items were accepted.
      RuntimeError: called by the engine's own thread, in a callback.
      TypeError: `items` is a text or a mapping: one item, and not several.
    """
    _check_several('predict', items)
    self._refuse_callback('predict')
    return [future.result() for future in self._admit(list(items))]

  def submit(
    self, item: Any, timeout: float | None = None
  ) -> concurrent.futures.Future:
    """Accepts one item; the result of the future is its answer or `Failure`.

    Args:
      item: for the policy to encode, in this thread.
      timeout: seconds to wait while `max_pending` rows are pending; None for
        as long as it takes.

    Raises:
      OverloadedError: there was no room in time.
      ClosedError: the engine is closed.
    """
    return self._admit([item], timeout)[0]

  def stream(self, items: Iterable[Any], window: int = 256) -> Iterator[Any]:
    """Answers in the order of the items, while they come.

    A thread reads the items, which may take their time, at most `window`
    ahead of the answer that is taken. An exception of `items` comes out
    behind the answers to what was before it.

    Args:
      items: a list, a file, a queue; read from the first `next` on.
      window: items read and not yet taken as answers.

    Raises:
      RuntimeError: at once, if called by the engine's own thread, in a
        callback.
      TypeError: at once, if `items` is a text or a mapping.
    """
    _check_several('stream', items)
    check_field('stream.window', window, integer(1, 10**7))
    self._refuse_callback('stream')
    return stream.in_order(items, self.submit, window)

  def _refuse_callback(self, method: str) -> None:
    if threading.current_thread() is self._thread:
      raise RuntimeError(
        f'engine.{method}: called in a callback, by the thread that answers; '
        'it would wait for itself: use submit()'
      )

  def close(self, drain: bool = True) -> None:
    """Ends the engine; may be called again, and from any thread.

    Args:
      drain: answer what has been accepted; otherwise it fails with
        `ClosedError`, except for what is on its way out of the device.
    """
    self._intake.close(cancel=not drain)
    with self._intake.lock:
      thread = self._thread
    if thread is not None and thread is not threading.current_thread():
      thread.join()

  def status(self) -> dict[str, int]:
    """Rows and bytes the engine holds now, and the most it ever held."""
    intake, pool = self._intake, self._worker.pool
    with intake.lock:
      return {
        'pending': intake.pending,
        'peak_pending': intake.peak_pending,
        'queued_rows': intake.rows,
        'queue_bytes': intake.queue_bytes,
        'pooled_rows': pool.rows,
        'pool_bytes': pool.bytes,
        'peak_pool_bytes': pool.peak_bytes,
        'copies': self._programs.copies,
      }

  # -- accepting -------------------------------------------------------------

  def _admit(
    self, items: Sequence[Any], timeout: float | None = None
  ) -> list[concurrent.futures.Future]:
    """Encodes items and queues them, as many at a time as fill a batch."""
    if self._warm_up is None:
      raise RuntimeError(
        'the engine has not compiled its programs: call warm_up() first, or '
        "use it as a context ('with Engine(...) as engine')"
      )
    futures: list[concurrent.futures.Future] = []
    # The worker makes the room: it must not wait for it (in a callback).
    block = threading.current_thread() is not self._thread
    announced = 0
    try:
      while len(futures) < len(items):
        wanted = min(len(items) - len(futures), self.grid.capacity)
        room = self._intake.reserve(wanted, timeout, block)
        start, stop = len(futures), len(futures) + room
        left = len(items) - stop
        futures += self._bring(items[start:stop], left - announced)
        announced = left
    finally:
      self._intake.expect(-announced)
    return futures

  def _bring(
    self, items: Sequence[Any], expected: int
  ) -> list[concurrent.futures.Future]:
    """Encodes and queues items for which there is room.

    `expected` is the change in how many more are on their way: the worker
    waits a moment for them with what is not full yet.
    """
    queued = 0
    try:
      futures = [_future() for _ in items]
      encoded = map(self._encode, items, futures)
      rows = [row for row in encoded if row is not None]
      self._queue(rows, expected)
      queued = len(rows)
    finally:
      self._intake.release(len(items) - queued)
    return futures

  def _encode(self, item: Any, future: concurrent.futures.Future) -> Row | None:
    """The row of an item; None if it cannot be served and is answered."""
    now = time.monotonic()
    handled = sys.exc_info()[1]
    try:
      encoded = self._policy.encode(item)
      if encoded.variant not in self._chain.variants:
        raise InputError(
          f'variant: expected one of {self._chain.variants}, got '
          f'{encoded.variant!r}'
        )
      length = self.grid.fit_length(encoded.length)
    except Exception as error:
      self.monitor.record_failure('encode')
      future.set_result(Failure.of(error, 'encode', handled))
      return None
    return Row(encoded, length, future, now, now)

  def _queue(self, rows: list[Row], expected: int) -> None:
    handled = sys.exc_info()[1]
    error = None
    with self._intake.lock:
      self._intake.put(rows)
      self._intake.expect(expected)
      if rows and not self._worker.is_active:
        error = self._start()
      if error is not None:
        rows = self._intake.clear()  # nobody served, so there are no others
    if error is not None:
      self._worker.fail(rows, error, 'engine', handled)

  def _start(self) -> Exception | None:
    """Starts the worker's thread; returns what kept it from starting."""
    thread = threading.Thread(target=self._worker.run, name='serve_lib engine')
    before, self._thread = self._thread, thread
    self._worker.is_active = True
    try:
      thread.start()
    except Exception as error:
      self._worker.is_active = False
      self._thread = before  # `close` could not join the other
      return error
    return None


def _check_several(method: str, items: Any) -> None:
  """Refuses what would be taken apart into characters or keys."""
  if isinstance(items, (str, bytes, bytearray, Mapping)):
    raise TypeError(
      f'engine.{method}: expected several items, as in a list, got one '
      f'{type(items).__name__}; one item is predict([item])[0] or submit(item)'
    )


def _future() -> concurrent.futures.Future:
  future: concurrent.futures.Future = concurrent.futures.Future()
  future.set_running_or_notify_cancel()  # so nobody can cancel it any more
  return future
