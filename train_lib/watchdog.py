"""Ends all processes of a training if one fails, dies or gets stuck.

A thread of each process writes a record to the key-value store of
`jax.distributed` every second. Process 0 reads all, the others that of process
0; the first fault that one sees is the verdict that all print before they exit.
Intervals are counted in ticks: no clocks are compared, and a process that was
suspended does not blame the others.

If native code keeps Python's lock, `faulthandler` prints the stacks and a peer
sees the silence. JAX would end the survivors too, with exit -6 and a native
stack trace, and still does if process 0, which has the store, is killed.
"""

import concurrent.futures
import contextlib
import faulthandler
import json
import os
import pathlib
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax
from jax._src import distributed  # JAX has no public key-value store

from core.errors import UserError

PEER, STUCK = 8, 9  # exit codes
TICK = 1.0  # seconds between records
# A peer is dead after this many seconds without a record; JAX waits 60.
SILENCE = 20.0
PERMANENT = 2, 3, 4  # codes of errors that a restart meets again
FINISHED = 'finished'
# Prefixes of keys; process 0 reads all of them, the others the shared ones.
_STORE, _SHARED = 'watchdog/', 'watchdog/shared/'
_VERDICT = f'{_SHARED}verdict'


class Watchdog:
  """A context that ends the process, and its peers, on a fault of any of them.

  Exit code `STUCK`: no `progress` of any process for `seconds`; `PEER`: another
  process failed or is silent; the code of a `PERMANENT` error is that of all.
  One of several processes ends at once on an error, which is printed, because a
  normal exit waits for the peers; errors with `in_all_processes` are raised.
  """

  def __init__(self, seconds: int):
    self._seconds = seconds
    self._state = (0, True, 'start')  # count, exempt, description
    self._stopped, self._ending = threading.Event(), threading.Lock()
    self._client: Any = distributed.global_state.client
    self._id = distributed.global_state.process_id or 0
    self._peers = (distributed.global_state.num_processes or 1) > 1
    self._beat = 0
    self._here = {'pid': os.getpid(), 'host': socket.gethostname()}
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._pool = concurrent.futures.ThreadPoolExecutor(1)

  def progress(self, now: str, exempt: bool = False) -> None:
    """Reports what is begun, in all processes; if `exempt` it may take long."""
    self._state = (self._state[0] + 1, exempt, now)

  def __enter__(self) -> 'Watchdog':
    self._thread.start()
    return self

  def __exit__(
    self, kind: Any, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    told = isinstance(error, UserError) and error.in_all_processes
    if error is not None and self._peers and not told:
      self._fail(error)
    self.progress(FINISHED, exempt=True)
    self._stopped.set()
    self._thread.join(5 * TICK)
    faulthandler.cancel_dump_traceback_later()
    self._pool.shutdown(wait=False)

  def _fail(self, error: BaseException) -> None:
    """Tells the peers about an error, prints it and ends the process."""
    if isinstance(error, jax.errors.JaxRuntimeError):
      # A collective fails if a peer is gone; the thread then names the peer.
      time.sleep(SILENCE + 3 * TICK)
    code = 1
    if isinstance(error, UserError):
      code = error.exit_code
    elif isinstance(error, SystemExit):
      code = error.code if isinstance(error.code, int) else 1
    elif isinstance(error, KeyboardInterrupt):
      code = 128 + signal.SIGINT
    else:
      traceback.print_exception(error)  # a bug
    text = ' '.join(str(error).split())
    if not isinstance(error, UserError):
      text = f'{type(error).__name__}: {text}'
    failed = f'process {self._id} failed at {self._state[2]}: {text}'
    told = code if code in PERMANENT else PEER
    self._end(code, text, verdict=f'{told} {failed}')

  def _run(self) -> None:
    try:
      self._watch()
    except Exception as error:  # a bug; without it the run could hang
      self._fail(error)

  def _watch(self) -> None:
    idle, counts, now = 0.0, None, time.monotonic()
    silent: dict[int, float] = {}  # seconds without a new record
    records: dict[int, dict[str, Any]] = {}
    while not self._stopped.wait(TICK):
      faulthandler.dump_traceback_later(self._seconds + SILENCE, file=2)
      before, now = now, time.monotonic()
      tick = min(now - before, 2 * TICK)  # more if it was suspended
      last = records
      try:
        records = self._pool.submit(self._exchange).result(SILENCE)
      except (TimeoutError, RuntimeError, concurrent.futures.CancelledError):
        # A stopped process 0 does not answer, a killed one refuses.
        if self._stopped.is_set():
          return
        if not self._id:  # it runs the store itself
          store = 'the key-value store of jax.distributed'
          self._end(PEER, f'{store} does not answer')
        self._silent(0, last.get(0, {}))
      for peer, record in records.items():
        fresh = record['beat'] != last.get(peer, {}).get('beat')
        silent[peer] = 0.0 if fresh else silent[peer] + tick
        if silent[peer] > SILENCE and record['now'] != FINISHED:
          self._silent(peer, record)
      if self._id:
        continue  # process 0 judges the progress of all
      before_counts = counts
      counts = {peer: record['count'] for peer, record in records.items()}
      exempt = any(record['exempt'] for record in records.values())
      idle = 0.0 if exempt or counts != before_counts else idle + tick
      if idle > self._seconds:
        self._stuck(records)
    with contextlib.suppress(RuntimeError):
      self._exchange()  # tells that this process has finished

  def _exchange(self) -> dict[int, dict[str, Any]]:
    """Writes the own record; returns records by process, ends on a verdict."""
    count, exempt, now = self._state
    self._beat += 1
    record = dict(beat=self._beat, count=count, exempt=exempt, now=now)
    if not self._peers:
      return {0: record}
    folder = _STORE if self._id else _SHARED
    text = json.dumps(record | self._here)
    self._client.key_value_set(f'{folder}{self._id}', text, True)
    folder = _SHARED if self._id else _STORE
    entries = dict(self._client.key_value_dir_get(folder))
    if verdict := entries.pop(_VERDICT, ''):
      code, _, text = verdict.partition(' ')
      self._end(int(code), text)
    return {
      int(key.rpartition('/')[2]): json.loads(text)
      for key, text in entries.items()
    }

  def _silent(self, peer: int, record: dict[str, Any]) -> None:
    where = 'process {pid} of {host}, at {now}' if record else 'no record'
    text = f'process {peer} ({where.format(**record)}) does not answer'
    if record and record['host'] == self._here['host']:
      _kill_if_stopped(record['pid'])
    self._end(PEER, text, verdict=f'{PEER} {text}' if peer else '')

  def _stuck(self, records: dict[int, dict[str, Any]]) -> None:
    least = min(record['count'] for record in records.values())
    names = '; '.join(
      f'process {peer} is stuck at {record["now"]}'
      for peer, record in sorted(records.items())
      if record['count'] == least
    )
    text = f'no progress for {self._seconds} s (watchdog_seconds): {names}'
    self._end(STUCK, text, verdict=f'{STUCK} {text}')

  def _end(self, code: int, text: str, verdict: str = '') -> None:
    """Prints one line and ends the process; peers read the verdict first."""
    self._ending.acquire()  # never released: another thread may find a fault
    if verdict and self._peers:
      # One of several verdicts wins. The store does not answer if it is gone.
      _within(3 * TICK, self._client.key_value_set, _VERDICT, verdict)
    os.write(2, f'error: {text}\n'.encode())
    _within(TICK, sys.stdout.flush)  # may block, as may be the cause
    if self._peers and not self._id:
      time.sleep(3 * TICK)  # the store ends with process 0
    os._exit(code)


def _within(seconds: float, call: Callable[..., Any], *args: Any) -> None:
  """Calls a function that may fail or block; waits for some seconds."""

  def run() -> None:
    with contextlib.suppress(RuntimeError, OSError, ValueError):
      call(*args)

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  thread.join(seconds)


def _kill_if_stopped(pid: int) -> None:
  """Kills a local process that is stopped: it could not end by itself."""
  with contextlib.suppress(OSError, IndexError):
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
    if stat.rpartition(')')[2].split()[0] in 'Tt':
      os.kill(pid, signal.SIGKILL)
