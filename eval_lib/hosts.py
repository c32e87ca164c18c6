"""Where the candidates of a benchmark run: in this process or in their own.

Threads, allocators and compilers of one library cannot slow down another when
each has its own process. A process that dies or hangs loses its own results
only. This module does not import jax, so that a process of another library
need not.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

Case = Mapping[str, Any]
# Seconds `[calls]` of each of `calls` calls; None if they could not be timed.
Timer = Callable[[int], Float[np.ndarray, ' C'] | None]

CLOSE_SECONDS = 5.0
SETTLE_SECONDS = 0.02  # thread pools spin for some milliseconds after work
_ERROR_LINES = 12


@dataclasses.dataclass(frozen=True)
class Call:
  """A candidate prepared for a case.

  Attributes:
    run: what is timed; arrays of jax that it returns are waited for.
    rows: examples that one call processes; seconds are divided by it.
    output: compared with those of the candidates of the same group, or None.
    columns: further columns of the candidate's row.
    flops: see `Candidate`, where they depend on the case.
  """

  run: Callable[[], Any]
  rows: int = 1
  output: Any = None
  columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  flops: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Candidate:
  """Something to time in every case.

  Attributes:
    name: unique in the benchmark.
    make: `(case, **options) -> Call`, or None if it has no part in the case; a
      function of a module where `process` is given.
    options: of `make`.
    process: name of the process to run in, which candidates may share; '' for
      this process.
    is_baseline: whether it may be the baseline; of several, the one with the
      smallest median is.
    baseline: name of the candidate to compare with instead; '' for none.
    flops: (every block once and in full, computed) per example by formula; the
      first gives the limit of the speed-up. None without a formula.
    group: candidates of a group compute the same output; '' for none.
  """

  name: str
  make: Callable[..., Call | None]
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  process: str = ''
  is_baseline: bool = False
  baseline: str = ''
  flops: tuple[float, float] | None = None
  group: str = ''


def timer(
  function: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
) -> Timer:
  """Returns a timer of a function in this process."""

  def take(calls: int) -> Float[np.ndarray, ' C']:
    seconds = []
    for _ in range(calls):
      started = clock()
      result = function()
      if 'jax' in sys.modules:
        sys.modules['jax'].block_until_ready(result)
      seconds.append(clock() - started)
    return np.array(seconds)

  return take


class Host:
  """Prepares and times calls in this process."""

  def __init__(self):
    self._calls: dict[Any, Call] = {}

  def prepare(
    self, key: Any, make: Callable[..., Call | None], case: Case, options: Any
  ) -> dict[str, Any] | None:
    """Makes and runs a call once; returns what its row needs to know."""
    call = make(case, **options)
    if call is None:
      return None
    timer(call.run)(1)
    self._calls[key] = call
    return {
      'rows': call.rows,
      'output': None if call.output is None else np.asarray(call.output),
      'columns': dict(call.columns),
      'flops': call.flops,
    }

  def take(self, key: Any, calls: int) -> Float[np.ndarray, ' C']:
    """Returns the seconds of each call."""
    seconds = timer(self._calls[key].run)(calls)
    assert seconds is not None
    return seconds


class ProcessError(RuntimeError):
  """A process died or hung; the message ends with what it printed last."""


class Process:
  """A `Host` in a process of its own.

  Args:
    log: file for everything that it prints.
    timeout: seconds within which each answer must come.
    environment: variables set before its first import.
  """

  def __init__(
    self,
    log: pathlib.Path,
    timeout: float,
    environment: Mapping[str, str],
  ):
    context = multiprocessing.get_context('spawn')
    self._connection, theirs = context.Pipe()
    self._log, self._timeout = log, timeout
    log.touch()  # the process may die before it writes
    self._process = context.Process(
      target=_serve, args=(theirs, str(log), dict(environment)), daemon=True
    )
    self._process.start()
    theirs.close()  # so that its end is seen here

  @property
  def pid(self) -> int | None:
    """The number of the process."""
    return self._process.pid

  def ask(self, method: str, *arguments: Any) -> Any:
    """Calls a method of the `Host` there.

    Raises:
      ProcessError: there is no answer.
    """
    try:
      self._connection.send((method, arguments))
      if not self._connection.poll(self._timeout):
        raise TimeoutError(f'gave no answer in {self._timeout:.0f} s')
      return self._connection.recv()
    except (OSError, EOFError) as error:
      self.close()
      what = str(error) if isinstance(error, TimeoutError) else 'died'
      text = self._log.read_text(encoding='utf-8', errors='replace')
      tail = '\n'.join(text.strip().splitlines()[-_ERROR_LINES:])
      code = self._process.exitcode
      raise ProcessError(f'{what} (exit code {code})\n{tail}') from error

  def prepare(self, *arguments: Any) -> dict[str, Any] | None:
    """See `Host.prepare`."""
    return self.ask('prepare', *arguments)

  def take(self, key: Any, calls: int) -> Float[np.ndarray, ' C']:
    """See `Host.take`."""
    time.sleep(SETTLE_SECONDS)
    return self.ask('take', key, calls)

  def close(self) -> None:
    """Ends the process; may be called again."""
    self._connection.close()  # ends the loop of `_serve`
    self._process.join(CLOSE_SECONDS)
    if self._process.is_alive():
      self._process.kill()
      self._process.join()


def _serve(connection: Any, log: str, environment: Mapping[str, str]) -> None:
  """Answers `Process.ask` until its connection is closed."""
  os.environ.update(environment)
  with open(log, 'wb') as file:
    for stream in (1, 2):
      os.dup2(file.fileno(), stream)
  host = Host()
  with contextlib.suppress(EOFError, KeyboardInterrupt):
    while True:
      method, arguments = connection.recv()
      connection.send(getattr(host, method)(*arguments))


class Hosts:
  """The hosts of a benchmark by name; a context that ends their processes.

  Args:
    report: called with a line when a process is lost.
    timeout: see `Process`.
    environment: see `Process`.

  Attributes:
    lost: names of the processes that died or hung.
  """

  def __init__(
    self,
    report: Callable[[str], None] = print,
    timeout: float = 1800.0,
    environment: Mapping[str, str] | None = None,
  ):
    self._hosts: dict[str, Any] = {'': Host()}
    self.lost: set[str] = set()
    self._report, self._timeout = report, timeout
    self._environment = dict(environment or {})
    self._stack = contextlib.ExitStack()

  def __enter__(self) -> 'Hosts':
    folder = tempfile.TemporaryDirectory(prefix='benchmark_')
    self._directory = pathlib.Path(self._stack.enter_context(folder))
    return self

  def __exit__(self, *error: object) -> None:
    self._stack.close()

  def prepare(self, candidate: Candidate, case: Case) -> dict[str, Any] | None:
    """Prepares a candidate for a case; None if it has no part in it."""
    name = candidate.process
    if name not in self._hosts and name not in self.lost:
      log = self._directory / f'{len(self._hosts)}.log'
      host = Process(log, self._timeout, self._environment)
      self._hosts[name] = host
      self._stack.callback(host.close)
    key = candidate.name, str(dict(case))
    arguments = key, candidate.make, dict(case), dict(candidate.options)
    return self._ask(name, 'prepare', *arguments)

  def timer(self, candidate: Candidate, case: Case) -> Timer:
    """Returns a timer of a prepared candidate."""
    key = candidate.name, str(dict(case))
    return lambda calls: self._ask(candidate.process, 'take', key, calls)

  def _ask(self, name: str, method: str, *arguments: Any) -> Any:
    if name in self.lost:
      return None
    try:
      return getattr(self._hosts[name], method)(*arguments)
    except ProcessError as error:
      self.lost.add(name)
      self._report(f'left out: {name} {error}')
      return None
