"""EAT timed against dense BERTs, ours and others'; used by `launch.benchmark`.

This process computes nothing: it writes random weights, starts a process for
every contender (`launch.eat_speed.worker`), lets them take turns and makes the
tables. Contenders that should compute the same are compared before anything
is timed.
"""

import contextlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import rich.console
import rich.progress

from launch import contest
from launch.eat_speed import lineup, tables
from launch.eat_speed.lineup import Contender, Settings

# How far the scores of the same weights may be apart. They are of size 0.1 to
# 1; bfloat16 has 8 bits.
TOLERANCE: Mapping[str, float] = {'float32': 1e-4, 'bfloat16': 5e-2}

BUSY_LOAD = 0.5  # average number of running threads

Tables = tuple[list[tables.Row], list[tables.LengthRow]]


def run(settings: Settings, report: Callable[[str], None]) -> Tables:
  """Runs the benchmark.

  Args:
    settings: what is timed.
    report: gets a line about each contender, and about what went wrong.

  Raises:
    ValueError: the model cannot be built, names the field; or no dense form
      could be timed.
  """
  contenders = lineup.contenders(settings)
  absent = lineup.missing(settings)
  for group, reason in absent.items():
    report(f'left out: {group}: {reason}')
  contenders = [one for one in contenders if one.group not in absent]
  load = os.getloadavg()[0]
  if load > BUSY_LOAD:
    report(
      f'busy machine: its load is {load:.1f} before anything has started; who '
      'uses many threads suffers most, so compare nothing'
    )
  with tempfile.TemporaryDirectory(prefix='eat_benchmark_') as name:
    directory = pathlib.Path(name)
    lineup.write_weights(settings, directory)
    with contest.Contest(directory, settings.timeout, report) as processes:
      devices = _start(processes, contenders, settings, directory, report)
      turns = _turns(contenders, settings)
      with _progress() as advance:
        samples = processes.run(
          turns,
          rounds=settings.rounds,
          warmup=settings.warmup,
          min_seconds=settings.min_seconds,
          advance=advance,
        )
  return (
    tables.rows(contenders, samples, settings, devices),
    tables.length_rows(samples, settings),
  )


def _turns(
  contenders: Sequence[Contender], settings: Settings
) -> list[contest.Turn]:
  turns = [
    contest.Turn(one.name, batch, one.worker, one.case(batch))
    for batch in settings.batches
    for one in contenders
  ]
  if settings.length_buckets:
    turns += [
      contest.Turn(case, 0, lineup.LENGTHS, case)
      for case in ('padded', 'buckets')
    ]
  return turns


def _start(
  processes: contest.Contest,
  contenders: Sequence[Contender],
  settings: Settings,
  directory: pathlib.Path,
  report: Callable[[str], None],
) -> dict[str, str]:
  """Starts the processes one by one; returns the device of each contender."""
  by_worker = {one.worker: one for one in reversed(contenders)}
  order = list(dict.fromkeys(one.worker for one in contenders))
  if settings.length_buckets:
    lengths = lineup.LENGTHS
    by_worker[lengths] = Contender(lengths, '', lengths, 'jax:lengths', 'bert')
    order.append(lengths)
  answers: dict[str, Any] = {}
  for worker in order:
    answer = processes.start(
      worker,
      [sys.executable, '-m', 'launch.eat_speed.worker'],
      lineup.specification(by_worker[worker], settings, directory),
      _environment(settings),
    )
    if answer is not None:
      answers[worker] = answer
      report(_introduction(worker, answer))
  for line in disagreements(by_worker, answers, TOLERANCE[settings.dtype]):
    report(line)
  return {
    one.name: answers[one.worker]['device']
    for one in contenders
    if one.worker in answers
  }


def _environment(settings: Settings) -> dict[str, str]:
  """Variables of the processes."""
  variables = {
    # Many processes share a GPU.
    'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
    'HF_HUB_OFFLINE': '1',
    'TF_CPP_MIN_LOG_LEVEL': '3',
  }
  if settings.platform:
    variables['JAX_PLATFORMS'] = settings.platform
  return variables


def _introduction(worker: str, answer: Mapping[str, Any]) -> str:
  versions = ' '.join(f'{k} {v}' for k, v in answer['versions'].items())
  return (
    f'{worker}: {answer["device"]}, {answer["threads"]} cores, {versions}; '
    f'ready after {answer["prepare_seconds"]:.1f} s (loaded, compiled, called '
    'once)'
  )


def disagreements(
  contenders: Mapping[str, Contender],
  answers: Mapping[str, Any],
  tolerance: float,
) -> list[str]:
  """Lines about contenders of the same weights with different results.

  Args:
    contenders: by their process.
    answers: the first answers of the processes.
    tolerance: largest difference that is nothing to report.
  """
  lines = []
  first: dict[tuple[str, bool], str] = {}
  for worker, answer in answers.items():
    one = contenders[worker]
    if not answer['scores']:
      continue
    # EAT prunes: it agrees with itself alone.
    other = first.setdefault((one.weights, one.exit_rate is None), worker)
    pairs = zip(answer['scores'], answers[other]['scores'], strict=False)
    difference = max(abs(mine - theirs) for mine, theirs in pairs)
    if not difference <= tolerance:
      lines.append(
        f'WARNING: {worker} and {other} have the same weights, but their '
        f'scores are {difference:.2g} apart; expected at most {tolerance:.2g}'
      )
  return lines


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
  """A bar on stderr with the time that is left."""
  columns = (
    *rich.progress.Progress.get_default_columns(),
    rich.progress.TimeElapsedColumn(),
  )
  console = rich.console.Console(stderr=True)
  with rich.progress.Progress(*columns, console=console) as bar:
    tasks: dict[str, Any] = {}

    def advance(phase: str, share: float) -> None:
      if phase not in tasks:
        tasks[phase] = bar.add_task(phase, total=1.0)
      bar.update(tasks[phase], completed=share)

    yield advance
