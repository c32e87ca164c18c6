"""A search over ranges of configuration fields with optuna.

Its study, in a file or a database, is shared by all processes of a search. Each
thread takes a trial and trains it as a child process in the trial's directory.
A trial without a sign of life is taken over and continues in that directory.
"""

import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from core import files
from core.errors import ConfigError
from launch import command_line, sweep_runs
from launch.command_line import UsageError
from launch.sweep_runs import Flags, Run

try:
  import optuna
  import optuna.storages.journal
  from optuna.exceptions import UpdateFinishedTrialError
  from optuna.trial import TrialState
except ImportError as error:
  missing = "a search needs optuna: pip install -e '.[sweep]'"
  raise UsageError(missing) from error

FORMS = 'uniform(a,b), log(a,b), int(a,b) or choice(x,y,...) with a <= b'
# Signs of life are by the clock of each host.
BEAT_SECONDS, SILENT_SECONDS, POLL_SECONDS = 10, 40, 1
MAX_POINTS = 100_000  # of a grid

Range = tuple[str, tuple[Any, ...]]  # kind; the ends, or texts of a choice


def suggest(trial: Any, key: str, found: Range) -> Any:
  """Returns the value of a trial; raises ValueError for an empty range."""
  kind, values = found
  if kind == 'choice':
    return trial.suggest_categorical(key, values)
  if kind == 'int':
    return trial.suggest_int(key, *values)
  return trial.suggest_float(key, *values, log=kind == 'log')


def parse_range(text: str) -> tuple[str, Range]:
  """Reads 'KEY=RANGE'; raises ConfigError unless it is one of FORMS."""
  key, _, body = text.partition('=')
  found = re.fullmatch(r'(uniform|log|int|choice)\((.+)\)', body)
  try:
    kind, inside = found.groups() if found else ('', '')
    convert = {'int': int, 'choice': str}.get(kind, float)
    # Commas in brackets belong to a value.
    parts = re.split(r',(?![^(\[]*[)\]])', inside)
    values = tuple(convert(part.strip()) for part in parts)
    suggest(optuna.trial.FixedTrial({key: values[0]}), key, (kind, values))
  except (ValueError, TypeError, OverflowError) as error:
    raise ConfigError(f'--vary={key}', body, FORMS) from error
  return key, (kind, values)


def read_space(flags: Flags) -> dict[str, Range]:
  """Returns the ranges of --vary.

  Raises ConfigError for an unknown field, and for an end that is illegal with
  the fixed values of the others. Combinations are up to each trial.
  """
  sweep_runs.read_config(flags, flags.config, flags.fixed)
  space: dict[str, Range] = {}
  for key, (kind, values) in map(parse_range, flags.vary):
    if key in space:
      raise ConfigError('--vary', key, 'each field once')
    if flags.sampler == 'grid' and kind not in ('int', 'choice'):
      raise ConfigError(f'--vary={key}', kind, 'int or choice in a grid')
    space[key] = kind, values
    for value in values:
      try:
        command_line.load_config(flags.config, [*flags.fixed, f'{key}={value}'])
      except ConfigError as error:
        field = error.field.removeprefix('--config.')
        if f'{key}.'.startswith(f'{field}.'):
          raise
  return space


class Search:
  """A study, and the trials of it that this process trains."""

  def __init__(self, flags: Flags):
    """Checks the space and opens the study."""
    self.flags, self.space = flags, read_space(flags)
    self.grid: list[tuple[Any, ...]] = []
    if flags.sampler == 'grid':
      values = [
        range(ends[0], min(ends[1], ends[0] + MAX_POINTS) + 1)
        if kind == 'int' else ends for kind, ends in self.space.values()
      ]  # fmt: skip
      points, most = itertools.product(*values), flags.trials or MAX_POINTS + 1
      self.grid = [*itertools.islice(points, most)]
      if len(self.grid) > MAX_POINTS:
        raise ConfigError('--vary', 'more', f'at most {MAX_POINTS} points')
    self.size = len(self.grid) or flags.trials or 0
    if not self.size:
      expected = 'a number; only a grid has its own'
      raise ConfigError('--trials', flags.trials, expected)
    self.study = _open(flags)
    self.lock, self.stop = threading.Lock(), threading.Event()
    self.name = f'{socket.gethostname()} {os.getpid()}'

  def trials(self) -> list[Any]:
    """Returns the trials that count, by number."""
    return self.study.get_trials(deepcopy=False)[: self.size]

  def work(self, environment: Mapping[str, str], cores: Sequence[int]) -> None:
    """Trains trials, until there are enough or `stop` is set."""
    if cores:  # of this thread and its children
      os.sched_setaffinity(0, cores)
    try:
      while not self.stop.is_set():
        if trial := self._take():
          with contextlib.suppress(UpdateFinishedTrialError):  # taken over
            self._train(trial, environment)
        elif all(t.state.is_finished() for t in self.trials()):
          return
        else:  # another process trains it, and may die
          self.stop.wait(POLL_SECONDS)
    except BaseException:
      self.stop.set()
      raise

  def _take(self) -> Any:
    """Returns a trial to train, with its values, or None."""
    with self.lock:
      trials, flags = self.trials(), self.flags
      if silent := next(filter(_is_silent, trials), None):
        trial = optuna.Trial(self.study, silent._trial_id)
      elif len(trials) < self.size:
        trial = self.study.ask()
      else:
        return None
      if trial.number >= self.size:  # two processes have asked at once
        return None
      trial.set_user_attr('beat', time.time())
      trial.set_user_attr('owner', self.name)
      # 10 random trials, the default, leave few of a short search.
      first = max(3, min(10, self.size // 3))
      self.study.sampler = optuna.samplers.TPESampler(
        n_startup_trials=first if flags.sampler == 'tpe' else self.size,
        seed=1000 * flags.seed + trial.number,  # a resumed search goes on
      )
      if self.grid:
        point = dict(zip(self.space, self.grid[trial.number], strict=True))
      else:
        point = {k: suggest(trial, k, one) for k, one in self.space.items()}
      trial.set_user_attr('point', point)
      return trial

  def run_of(self, trial: Any) -> Run:
    """Returns the training of a trial."""
    point = trial.user_attrs['point']
    for key, value in point.items():  # from a file, which may be of others
      legal = self.space.get(key, ('', ()))[1]
      is_number = legal and isinstance(value, int | float)
      if not (is_number or value in legal):
        raise UsageError(f'trial {trial.number} of the study: {key}={value!r}')
    items = point.items()
    name = ' '.join(
      f'{k}={v:.4g}' if isinstance(v, float) else f'{k}={v}' for k, v in items
    )
    overrides = [*self.flags.fixed, *(f'{k}={v}' for k, v in items)]
    workdir = pathlib.Path(self.flags.workdir, f'trial_{trial.number}')
    return Run(name, self.flags.config, overrides, workdir)

  def _train(self, trial: Any, environment: Mapping[str, str]) -> None:
    """Trains a trial and stores its result, or why there is none."""
    run, metric = self.run_of(trial), self.flags.metric
    place = f'[{trial.number + 1}/{self.size}]'
    print(f'{place} {run.name}', flush=True)
    # Of a finished run too: launch.train refuses that of another configuration.
    code = self._run(trial, run, environment)
    result = run.result() or {} if code == command_line.OK else {}
    if result and metric not in result:
      known = ', '.join(sorted(name for name in result if '/' in name))
      raise ConfigError('--metric', metric, f'in a new workdir one of {known}')
    value, state, reason = result.get(metric), TrialState.COMPLETE, ''
    is_over = result or code is None
    if not is_over and (code == command_line.LOCKED or self.stop.is_set()):
      # A training whose sweep was killed, or who took the trial at the same
      # time, may hold the lock; the last who took it frees it again.
      if self.study.trials[trial.number].user_attrs['owner'] == self.name:
        trial.set_user_attr('beat', 0)
      self.stop.wait(5 * POLL_SECONDS)
      return
    if not result and code is None:
      state, reason = TrialState.PRUNED, 'worse than the median'
    elif not isinstance(value, float):
      lines = (run.workdir / 'train.log').read_text(errors='replace')
      failure = f'exit code {code}: {lines.strip().rpartition(os.linesep)[2]}'
      reason = f'{metric} is {value}' if result else failure
      state, value = TrialState.FAIL, None
    trial.set_user_attr('metrics', result)
    trial.set_user_attr('reason', reason)
    self.study.tell(trial, value, state, skip_if_finished=True)
    shown = files.printable(reason or value)
    print(f'{place} {state.name.lower()}: {shown}', flush=True)

  def _run(
    self, trial: Any, run: Run, environment: Mapping[str, str]
  ) -> int | None:
    """Runs a training; returns its exit code, or None if it was pruned."""
    from eval_lib import report

    run.workdir.mkdir(parents=True, exist_ok=True)
    reported = {*self.study.trials[trial.number].intermediate_values}
    beat, is_bad, curves = time.monotonic(), False, {}
    with (
      files.open_append(run.workdir / 'train.log') as log,
      subprocess.Popen(
        # Own process group: otherwise the child gets Ctrl-C twice.
        [sys.executable, *run.command()], env=environment, process_group=0,
        stdout=log, stderr=subprocess.STDOUT,
      ) as process,
      contextlib.ExitStack() as stack,
    ):  # fmt: skip
      stack.callback(process.terminate)  # nothing if it has ended
      while process.poll() is None and not (is_bad or self.stop.is_set()):
        self.stop.wait(POLL_SECONDS)
        if time.monotonic() - beat > BEAT_SECONDS:
          beat = time.monotonic()
          trial.set_user_attr('beat', time.time())
        if self.flags.prune:
          with contextlib.suppress(OSError, ValueError):
            curves = report.read_curves(run.workdir / 'metrics.jsonl')
        for step, value in zip(*curves.get(self.flags.metric, ()), strict=True):
          if step not in reported:
            reported.add(step)
            trial.report(value, int(step))
            is_bad = is_bad or trial.should_prune()
    if is_bad:
      return None
    if process.returncode in (command_line.PREEMPTED, command_line.INTERRUPTED):
      self.stop.set()
    return process.returncode

  def report(self) -> None:
    """Prints the table, writes the files and the picture."""
    from eval_lib import adaptive_plots

    flags, runs = self.flags, []
    for trial in self.trials():
      about = trial.user_attrs
      state = f'{trial.state.name.lower()} {about["reason"]}'.strip()
      others = {'trial': trial.number, 'state': state, **about['point']}
      runs.append((self.run_of(trial), about['metrics'], others))
    rows = sweep_runs.report(flags, runs)
    rows.sort(key=lambda row: row['trial'])
    columns = {k: [row[k] for row in rows] for k in (flags.metric, *self.space)}
    logs = [key for key, (kind, _) in self.space.items() if kind == 'log']
    path = pathlib.Path(flags.workdir, 'sweep.png')
    with adaptive_plots.if_installed():
      adaptive_plots.plot_trials(path, columns, flags.mode, logs)
      print(f'picture: {path}')


def _is_silent(trial: Any) -> bool:
  beat = trial.user_attrs.get('beat', trial.datetime_start.timestamp())
  return not trial.state.is_finished() and time.time() - beat > SILENT_SECONDS


def search(flags: Flags) -> int:
  """Runs a search; returns the exit code."""
  optuna.logging.set_verbosity(optuna.logging.WARNING)
  shares = [sweep_runs.devices(n, flags.workers) for n in range(flags.workers)]
  work = Search(flags)
  with contextlib.ExitStack() as stack:
    for number in (signal.SIGTERM, signal.SIGINT):
      old = signal.signal(number, lambda *_: work.stop.set())
      stack.callback(signal.signal, number, old)
    pool = concurrent.futures.ThreadPoolExecutor(flags.workers)
    stack.enter_context(pool)
    for worker in [pool.submit(work.work, *share) for share in shares]:
      worker.result()
  if work.stop.is_set():
    print('stopped; the same command continues', file=sys.stderr)
    return command_line.PREEMPTED
  if all(trial.state != TrialState.COMPLETE for trial in work.trials()):
    command_line.fail(f'no trial has finished; see {flags.workdir}/*/train.log')
  work.report()
  return command_line.OK


def _repair(journal: pathlib.Path) -> None:
  """Drops last lines that are torn, e.g. by a full disk or a killed process."""
  if journal.is_symlink():
    raise UsageError(f'{journal} is a link: remove it')
  if not journal.exists():
    return
  lock = optuna.storages.journal.JournalFileSymlinkLock(str(journal))
  lock.acquire()
  try:
    lines = files.read_bytes(journal, files.MAX_LOG).split(b'\n')[:-1]
    while lines and not _is_object(lines[-1]):
      lines.pop()
    os.truncate(journal, sum(len(line) + 1 for line in lines))
  finally:
    lock.release()


def _is_object(line: bytes) -> bool:
  with contextlib.suppress(*files.DAMAGE):
    return isinstance(json.loads(line), dict)
  return False


def _open(flags: Flags) -> Any:
  """Opens or creates the study; raises ConfigError if it is another search."""
  journal = pathlib.Path(flags.workdir, 'search.journal')
  journal.parent.mkdir(parents=True, exist_ok=True)
  _repair(journal)
  try:
    storage: Any = flags.storage or optuna.storages.JournalStorage(
      optuna.storages.journal.JournalFileBackend(str(journal))
    )
    study = optuna.create_study(
      study_name=os.path.abspath(flags.workdir), storage=storage,
      load_if_exists=True,
      direction='maximize' if flags.mode == 'max' else 'minimize',
      pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )  # fmt: skip
  except Exception as error:  # many kinds, of optuna, sqlalchemy and drivers
    raise UsageError(f'study in {flags.storage or journal}: {error}') from error
  for name in ('config', 'fixed', 'metric', 'mode', 'sampler', 'vary'):
    given = str(getattr(flags, name))
    saved = study.user_attrs.get(name, given)
    if saved != given:
      expected = f'{saved}, as the search began, or another --workdir'
      raise ConfigError(f'--{name}', given, expected)
    study.set_user_attr(name, given)
  return study
