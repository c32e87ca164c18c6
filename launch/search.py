"""A search over ranges of configuration fields with optuna.

All processes of a search share its study. Each thread takes a trial and trains
it as a child process in the trial's directory. A trial whose heartbeat stops is
failed; a retry continues in that directory.
"""

import concurrent.futures
import contextlib
import functools
import logging
import math
import os
import pathlib
import re
import sqlite3
import subprocess
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from core import files
from core.errors import ConfigError
from launch import command_line, sweep_runs
from launch.command_line import UsageError
from launch.sweep_runs import Flags, Run

try:
  import optuna
  import sqlalchemy
  from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
  from optuna.samplers import PartialFixedSampler, TPESampler
  from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
  from optuna.trial import TrialState
except ImportError as error:
  missing = "a search needs optuna: pip install -e '.[sweep]'"
  raise UsageError(missing) from error

FORMS = 'uniform(a,b), log(a,b), int(a,b) or choice(x,y,...) with a <= b'
SILENT_SECONDS, POLL_SECONDS = 40, 1
SAVED = 'config', 'fixed', 'metric', 'mode', 'sampler', 'vary'  # of a study

Range = tuple[str, tuple[Any, ...]]  # kind; the ends, or texts of a choice


class NoResultError(Exception):
  """A training has no value; without a 'reason' it is tried again."""


def suggest(trial: Any, key: str, legal: Range) -> Any:
  """Returns the value of a trial; raises ValueError for an empty range."""
  kind, values = legal
  if kind == 'choice':
    return trial.suggest_categorical(key, values)
  if kind == 'int':
    return trial.suggest_int(key, *values)
  return trial.suggest_float(key, *values, log=kind == 'log')


def parse_range(text: str) -> tuple[str, Range]:
  """Reads 'KEY=RANGE'; raises ConfigError unless it is one of FORMS."""
  key, _, body = text.partition('=')
  match = re.fullmatch(r'(uniform|log|int|choice)\((.+)\)', body)
  try:
    kind, inside = match.groups() if match else ('', '')
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
    is_grid = flags.sampler == 'grid'
    self.axes: dict[str, Sequence[Any]] = {  # of a grid
      key: range(values[0], values[1] + 1) if kind == 'int' else values
      for key, (kind, values) in self.space.items() if is_grid
    }  # fmt: skip
    points = math.prod(map(len, self.axes.values())) if is_grid else math.inf
    if not (is_grid or flags.trials):
      expected = 'a number; only a grid has its own'
      raise ConfigError('--trials', flags.trials, expected)
    self.size = int(min(points, flags.trials or points))
    self.study = _open(flags)
    self.lock, self.stop = threading.Lock(), threading.Event()

  def trials(self) -> list[Any]:
    """Returns the last try of each trial that counts, in their order."""
    last = {}
    for trial in self.study.get_trials(deepcopy=False):
      last[trial.system_attrs.get('failed_trial', trial.number)] = trial
    return [*last.values()][: self.size]

  def work(self, environment: Mapping[str, str], cores: Sequence[int]) -> None:
    """Trains trials until all have a result or a reason, or `stop` is set."""
    if cores:  # of this thread and its children
      os.sched_setaffinity(0, cores)
    try:
      while not self.stop.is_set():
        with contextlib.ExitStack() as asking:
          # Held until the trial has its values, lest others ask for its place.
          asking.enter_context(self.lock)
          trials = self._retried()
          states = [trial.state for trial in trials]
          if len(trials) < self.size or TrialState.WAITING in states:
            train = functools.partial(self._train, environment, asking.close)
            with contextlib.suppress(UpdateFinishedTrialError):  # taken over
              self.study.optimize(train, n_trials=1, catch=NoResultError)
            continue
        if all(state.is_finished() for state in states):
          return
        self.stop.wait(POLL_SECONDS)  # another process trains it, and may die
    except BaseException:
      self.stop.set()
      raise

  def _retried(self) -> list[Any]:
    """Returns `trials` after those that were stopped or lost wait again."""
    optuna.storages.fail_stale_trials(self.study)
    for old in filter(_is_lost, self.trials()):
      with contextlib.suppress(ValueError):  # it has failed
        self.study.tell(old.number, state=TrialState.FAIL)
      RetryHeartbeatStaleTrialCallback(None, True)(self.study, old)
    return self.trials()

  def _suggest(self, trial: Any) -> int:
    """Draws the values of a trial; returns its place."""
    numbers = [other.number for other in self.trials()]
    if trial.number not in numbers:  # two processes have asked at once
      raise NoResultError
    place = rest = numbers.index(trial.number)
    trial.set_user_attr('place', place)
    trial.set_user_attr('begun', trial.number)
    point = {}
    for key, axis in reversed(self.axes.items()):
      rest, index = divmod(rest, len(axis))
      point[key] = axis[index]
    # 10 random trials, the default, leave few of a short search.
    few = max(3, min(10, self.size // 3))
    first = few if self.flags.sampler == 'tpe' else self.size
    seed = 1000 * self.flags.seed + place  # a resumed search goes on
    sampler = TPESampler(n_startup_trials=first, seed=seed)
    self.study.sampler = PartialFixedSampler(point, sampler)
    for key, legal in self.space.items():
      suggest(trial, key, legal)
    return place

  def run_of(self, trial: Any) -> Run:
    """Returns the training of a trial."""
    place, items = trial.user_attrs['place'], trial.params.items()
    for key, value in items:  # from a file, which may be of others
      legal = self.space.get(key, ('', ()))[1]
      is_number = legal and isinstance(value, int | float)
      if not (is_number or value in legal):
        raise UsageError(f'trial {place} of the study: {key}={value!r}')
    name = ' '.join(
      f'{k}={v:.4g}' if isinstance(v, float) else f'{k}={v}' for k, v in items
    )
    overrides = [*self.flags.fixed, *(f'{k}={v}' for k, v in items)]
    workdir = pathlib.Path(self.flags.workdir, f'trial_{place}')
    return Run(name, self.flags.config, overrides, workdir)

  def _train(self, env: Mapping[str, str], asked: Any, trial: Any) -> float:
    """Trains a trial; returns its value, or raises why there is none."""
    title = f'[{self._suggest(trial) + 1}/{self.size}]'
    asked()
    run, metric = self.run_of(trial), self.flags.metric
    print(f'{title} {run.name}', flush=True)
    # Of a finished run too: launch.train refuses that of another configuration.
    # A training whose sweep was killed may hold the directory.
    while (code := self._run(trial, run, env)) == command_line.LOCKED:
      if self.stop.wait(5 * POLL_SECONDS):
        break
    result = run.result() or {} if code == command_line.OK else {}
    if result and metric not in result:
      names = ', '.join(sorted(name for name in result if '/' in name))
      raise ConfigError('--metric', metric, f'in a new workdir one of {names}')
    value: Any = result.get(metric)
    outcome, reason = 'fail', ''
    if code is None:
      outcome, reason = 'pruned', 'worse than the median'
    elif isinstance(value, float):
      outcome = 'complete'
    elif result:
      reason = f'{metric} is {value}'
    elif not self.stop.is_set():
      lines = (run.workdir / 'train.log').read_text(errors='replace')
      reason = f'exit code {code}: {lines.strip().rpartition(os.linesep)[2]}'
    trial.set_user_attr('metrics', result)
    trial.set_user_attr('reason', reason)
    shown = value if outcome == 'complete' else reason or 'stopped'
    print(f'{title} {outcome}: {files.printable(shown)}', flush=True)
    if outcome != 'complete':
      raise optuna.TrialPruned if outcome == 'pruned' else NoResultError
    return value

  def _run(self, trial: Any, run: Run, env: Mapping[str, str]) -> int | None:
    """Runs a training; returns its exit code, or None if it was pruned."""
    from eval_lib import report

    run.workdir.mkdir(parents=True, exist_ok=True)
    reported = {*self.study.trials[trial.number].intermediate_values}
    is_bad, curves = False, {}
    with (
      files.open_append(run.workdir / 'train.log') as log,
      run.start(env=env, stdout=log, stderr=subprocess.STDOUT) as process,
      contextlib.ExitStack() as stack,
    ):
      stack.callback(process.terminate)  # nothing if it has ended
      while process.poll() is None and not (is_bad or self.stop.is_set()):
        self.stop.wait(POLL_SECONDS)
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
    from eval_lib import plots, run_plots

    flags, runs = self.flags, []
    for trial in self.trials():
      about = trial.user_attrs
      state = f'{trial.state.name.lower()} {about["reason"]}'.strip()
      fields = {'trial': about['place'], 'state': state, **trial.params}
      runs.append((self.run_of(trial), about['metrics'], fields))
    rows = sweep_runs.report(flags, runs)
    rows.sort(key=lambda row: row['trial'])
    columns = {k: [row[k] for row in rows] for k in (flags.metric, *self.space)}
    logs = [key for key, (kind, _) in self.space.items() if kind == 'log']
    path = pathlib.Path(flags.workdir, 'sweep.png')
    with plots.if_installed():
      run_plots.plot_trials(path, columns, flags.mode, logs)
      print(f'picture: {path}')


def _is_lost(trial: Any) -> bool:
  """Returns True if a trial was stopped, or was killed as it began."""
  if trial.state == TrialState.RUNNING:
    silent = time.time() - trial.datetime_start.timestamp() > SILENT_SECONDS
    return silent and trial.user_attrs.get('begun') != trial.number
  return trial.state == TrialState.FAIL and not trial.user_attrs.get('reason')


def search(flags: Flags) -> int:
  """Runs a search; returns the exit code."""
  optuna.logging.set_verbosity(optuna.logging.WARNING)
  # Its warnings are of trials without a value, which `_train` prints.
  logging.getLogger('optuna.study._optimize').setLevel(logging.ERROR)
  shares = [sweep_runs.devices(n, flags.workers) for n in range(flags.workers)]
  work = Search(flags)
  with (
    sweep_runs.on_signals(lambda *_: work.stop.set()),
    concurrent.futures.ThreadPoolExecutor(flags.workers) as pool,
  ):
    for worker in [pool.submit(work.work, *share) for share in shares]:
      worker.result()
  if work.stop.is_set():
    return sweep_runs.stopped()
  if all(trial.state != TrialState.COMPLETE for trial in work.trials()):
    command_line.fail(f'no trial has finished; see {flags.workdir}/*/train.log')
  work.report()
  return command_line.OK


def _open(flags: Flags) -> Any:
  """Opens or creates the study; raises ConfigError if it is another search."""
  folder, url = pathlib.Path(flags.workdir), flags.storage
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / 'search.db'
  files.check_replaceable(path)
  local = {} if url else {'creator': lambda: sqlite3.connect(path, timeout=60)}
  warnings.simplefilter('ignore', ExperimentalWarning)
  for left in (2, 1, 0):  # processes that start at once make the same tables
    try:
      storage = RDBStorage(
        url or 'sqlite://', {'poolclass': sqlalchemy.NullPool, **local},
        heartbeat_interval=SILENT_SECONDS // 2, grace_period=SILENT_SECONDS,
      )  # fmt: skip
      study = optuna.create_study(
        study_name=os.path.abspath(flags.workdir), storage=storage,
        direction='maximize' if flags.mode == 'max' else 'minimize',
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
      )  # fmt: skip
      break
    except Exception as error:  # many kinds, of optuna, sqlalchemy and drivers
      if not left:
        raise UsageError(f'study in {url or path}: {error}') from error
      time.sleep(POLL_SECONDS / 2)
  for name in SAVED:
    value = str(getattr(flags, name))
    saved = study.user_attrs.get(name, value)
    if saved != value:
      expected = f'{saved}, as the search began, or another --workdir'
      raise ConfigError(f'--{name}', value, expected)
    study.set_user_attr(name, value)
  return study
