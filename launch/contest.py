"""Contenders in processes of their own, which take turns.

Threads, allocators and compilers of one library cannot slow another down when
each has its own process, and none is faster for having run last: in every
round each contender is asked in turn, in alternating directions, while the
others sleep. A process speaks one JSON object a line, a question in and an
answer out; what it prints otherwise is kept for the case that it dies, which
costs its own results and nobody else's.
"""

import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

ROOT = pathlib.Path(__file__).resolve().parents[1]
CLOSE_SECONDS = 5.0
# Thread pools spin for some milliseconds after their last work.
SETTLE_SECONDS = 0.02
_ERROR_LINES = 12


class WorkerError(RuntimeError):
  """A process died, hung, or said something else than an answer."""


class Turn(NamedTuple):
  """One thing that is timed, once in each round.

  Attributes:
    name: of the contender.
    batch: rows of a batch; only turns of the same batch are compared.
    worker: name of the process that does it.
    case: what that process is asked for.
  """

  name: str
  batch: int
  worker: str
  case: str


class Worker:
  """A process that answers questions; see the module.

  Attributes:
    name: for messages.

  Args:
    name: for messages.
    command: program and arguments.
    log: file that gets everything it prints.
    environment: variables beside those of this process.
  """

  def __init__(
    self,
    name: str,
    command: Sequence[str],
    log: pathlib.Path,
    environment: Mapping[str, str] | None = None,
  ):
    self.name = name
    self._log = log
    paths = [str(ROOT), os.environ.get('PYTHONPATH', '')]
    ours = {'PYTHONPATH': os.pathsep.join(filter(None, paths))}
    with log.open('wb') as file:
      self._process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=file,
        env={**os.environ, **ours, **(environment or {})},
        # Ctrl-C is for the parent, which ends its children.
        start_new_session=True,
      )

  def ask(self, question: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Asks and waits for the answer.

    Args:
      question: becomes one line of JSON.
      timeout: seconds to wait.

    Raises:
      WorkerError: there is no answer; the message ends with what the process
        printed last.
    """
    stdin, stdout = self._process.stdin, self._process.stdout
    assert stdin is not None
    assert stdout is not None
    try:
      stdin.write(json.dumps(question).encode() + b'\n')
      stdin.flush()
    except OSError as error:
      raise self._error('died') from error
    # Its own pipe has at most one answer, so nothing is left in a buffer.
    if not select.select([stdout], [], [], timeout)[0]:
      raise self._error(f'gave no answer in {timeout:.0f} s')
    line = stdout.readline()
    if not line:
      raise self._error('died')
    try:
      answer = json.loads(line)
    except ValueError as error:
      raise self._error(f'answered {line[:80]!r}, which is no JSON') from error
    if not isinstance(answer, dict):
      raise self._error(f'answered {answer!r}, expected an object')
    return answer

  def _error(self, what: str) -> WorkerError:
    self.close()
    code = self._process.returncode
    text = self._log.read_text(encoding='utf-8', errors='replace')
    tail = '\n'.join(text.strip().splitlines()[-_ERROR_LINES:])
    return WorkerError(f'{self.name} {what} (exit code {code})\n{tail}')

  def close(self) -> None:
    """Ends the process and all that it started; may be called again."""
    for pipe in (self._process.stdin, self._process.stdout):
      assert pipe is not None
      with contextlib.suppress(OSError):
        pipe.close()  # a worker ends at the end of its questions
    try:
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._process.wait(CLOSE_SECONDS)
    finally:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(self._process.pid, signal.SIGKILL)
      self._process.wait()


class Contest:
  """The processes of a benchmark; a context that ends them all.

  Attributes:
    workers: those that live, by name.
    lost: why the others do not, by name.

  Args:
    directory: for what they print.
    timeout: seconds within which each answer must come.
    report: is called with a line about everything that happens.
  """

  def __init__(
    self,
    directory: pathlib.Path,
    timeout: float,
    report: Callable[[str], None],
  ):
    self.workers: dict[str, Worker] = {}
    self.lost: dict[str, str] = {}
    self._directory, self._timeout = directory, timeout
    self._report = report

  def __enter__(self) -> 'Contest':
    return self

  def __exit__(self, *unused: object) -> None:
    for worker in self.workers.values():
      worker.close()

  def start(
    self,
    name: str,
    command: Sequence[str],
    question: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
  ) -> dict[str, Any] | None:
    """Starts a process; returns its first answer, None if it died."""
    log = self._directory / f'{len(self.workers) + len(self.lost)}.log'
    self.workers[name] = Worker(name, command, log, environment)
    return self.ask(name, question)

  def ask(
    self, name: str, question: Mapping[str, Any]
  ) -> dict[str, Any] | None:
    """Asks a process; None if it does not live (any more)."""
    if name not in self.workers:
      return None
    try:
      return self.workers[name].ask(question, self._timeout)
    except WorkerError as error:
      del self.workers[name]
      self.lost[name] = str(error)
      self._report(f'left out: {error}')
      return None

  def run(
    self,
    turns: Sequence[Turn],
    *,
    rounds: int,
    warmup: int,
    min_seconds: float,
    advance: Callable[[str, float], None] = lambda phase, share: None,
  ) -> dict[tuple[str, int], Float[np.ndarray, ' R']]:
    """Times all turns, round by round.

    A turn repeats its case until it should take `min_seconds`, by how long it
    took in the last round of the warm-up, where everything is done once.

    Args:
      turns: in the order of the even rounds; the odd ones go backwards.
      rounds: that count.
      warmup: rounds before them, at least 1.
      min_seconds: of a turn.
      advance: is called after each turn with 'warming up' or 'timing', and
        the share of it that is done, by time once times are known.

    Returns:
      Seconds per example of every round, by name and batch, of the contenders
      that lived to the end.
    """
    took = dict.fromkeys(turns, 1.0)
    for index in range(warmup):
      for done, turn in enumerate(_order(turns, index), 1):
        answer = self._take(turn, 1)
        if answer is not None:
          took[turn] = answer['seconds']
        advance('warming up', (index + done / len(turns)) / warmup)
    calls = {
      turn: max(1, int(np.ceil(min_seconds / max(took[turn], 1e-6))))
      for turn in turns
    }
    expected = {turn: calls[turn] * took[turn] for turn in turns}
    total, finished = rounds * sum(expected.values()), 0.0
    samples: dict[Turn, list[float]] = {turn: [] for turn in turns}
    for index in range(rounds):
      for turn in _order(turns, index):
        answer = self._take(turn, calls[turn])
        if answer is not None:
          samples[turn].append(answer['seconds'] / answer['examples'])
        finished += expected[turn]
        advance('timing', finished / total)
    return {
      (turn.name, turn.batch): np.array(values)
      for turn, values in samples.items()
      if len(values) == rounds
    }

  def _take(self, turn: Turn, calls: int) -> dict[str, Any] | None:
    time.sleep(SETTLE_SECONDS)
    return self.ask(turn.worker, {'case': turn.case, 'calls': calls})


def _order(turns: Sequence[Turn], index: int) -> Iterator[Turn]:
  """Whoever goes first is not always the same."""
  return iter(turns) if index % 2 == 0 else reversed(turns)


def serve(
  build: Callable[[dict[str, Any]], tuple[dict[str, Any], Mapping[str, Any]]],
) -> None:
  """The other side: answers questions on stdin until they end.

  Args:
    build: makes of the first question the first answer and the cases: what to
      call, by name; a call returns the number of examples that it processed.
  """
  # Libraries print; only answers may go where the answers go.
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)

  def say(answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + '\n')
    answers.flush()

  first, cases = build(json.loads(sys.stdin.readline()))
  say(first)
  for line in sys.stdin:
    question = json.loads(line)
    case = cases[question['case']]
    started = time.perf_counter()
    examples = sum(case() for _ in range(question['calls']))
    say({'seconds': time.perf_counter() - started, 'examples': examples})
