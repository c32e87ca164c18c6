"""A search over ranges of configuration fields with optuna.

The study, in a file or a database, is shared by all processes of a search. Each
thread takes a trial and trains it as a child process in the trial's directory.
A trial whose process has died is taken over and continues in that directory.
"""

import ast
import concurrent.futures
import contextlib
import glob
import itertools
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dataset_lib.errors import ConfigError
from launch import command_line, sweep_runs
from launch.command_line import UsageError
from launch.sweep_runs import Flags, Run

try:
  import optuna
  from optuna.exceptions import UpdateFinishedTrialError
  from optuna.trial import TrialState
except ImportError as error:
  missing = "a search needs optuna: pip install -e '.[sweep]'"
  raise UsageError(missing) from error

FORMS = 'uniform(a,b), log(a,b), int(a,b) or choice(x,y,...) with a <= b'
HOST = socket.gethostname()
POLL_SECONDS, BEAT_SECONDS, SILENT_SECONDS = 1.0, 30.0, 120.0


class Range(NamedTuple):
  """The ends of a range, or all values of a choice as texts."""

  kind: str
  values: tuple[Any, ...]

  def suggest(self, key: str, trial: Any) -> Any:
    """Returns the value of a trial; ValueError for a range of no values."""
    if self.kind == 'choice':
      return trial.suggest_categorical(key, self.values)
    if self.kind == 'int':
      return trial.suggest_int(key, *self.values)
    return trial.suggest_float(key, *self.values, log=self.kind == 'log')

  def all(self) -> Sequence[Any]:
    """Returns the values of a choice or of a range of integers."""
    if self.kind == 'choice':
      return self.values
    return range(self.values[0], self.values[1] + 1)


def parse_range(text: str) -> tuple[str, Range]:
  """Reads 'KEY=RANGE'; raises ConfigError unless it is one of FORMS."""
  key, _, body = text.partition('=')
  try:
    match ast.parse(body, mode='eval').body:
      case ast.Call(ast.Name('choice'), args, []):
        found = Range('choice', tuple(_text(body, one) for one in args))
      case ast.Call(ast.Name('int' | 'log' | 'uniform' as kind), args, []):
        found = Range(kind, tuple(map(ast.literal_eval, args)))
        types = {int} if kind == 'int' else {int, float}
        if not {*map(type, found.values)} <= types:
          raise ValueError
      case _:
        raise ValueError
    found.suggest(key, optuna.trial.FixedTrial({key: found.values[0]}))
  except (ValueError, SyntaxError, TypeError, IndexError) as error:
    raise ConfigError(f'--vary={key}', body, FORMS) from error
  return key, found


def _text(body: str, node: ast.expr) -> str:
  if isinstance(node, ast.Constant) and isinstance(node.value, str):
    return node.value  # without its quotation marks
  return ast.get_source_segment(body, node) or ''


def read_space(flags: Flags) -> dict[str, Range]:
  """Returns the ranges of --vary.

  Raises ConfigError for an unknown field, and for an end that is illegal with
  the fixed values of the others. Combinations are up to each trial.
  """
  space: dict[str, Range] = {}
  sweep_runs.read_config(flags, flags.config, flags.fixed)
  for key, found in map(parse_range, flags.vary):
    if key in space:
      raise ConfigError('--vary', key, 'each field once')
    if flags.sampler == 'grid' and found.kind not in ('int', 'choice'):
      raise ConfigError(f'--vary={key}', found.kind, 'int or choice in a grid')
    space[key] = found
    for value in found.values:
      try:
        command_line.load_config(flags.config, [*flags.fixed, f'{key}={value}'])
      except ConfigError as error:
        field = error.field.removeprefix('--config.')
        if f'{key}.'.startswith(f'{field}.'):
          raise
  return space


class _Point(optuna.samplers.RandomSampler):
  """Samples a given point."""

  def __init__(self, space: Mapping[str, Range], values: Sequence[Any]):
    super().__init__()
    self.point = dict(zip(space, values, strict=True))

  def sample_independent(
    self, study: Any, trial: Any, param_name: str, param_distribution: Any
  ) -> Any:
    return self.point[param_name]


class Search:
  """A study, and the trials of it that this process trains."""

  def __init__(self, flags: Flags):
    """Checks the space and opens the study."""
    self.flags, self.space = flags, read_space(flags)
    self.points: list[Any] = []
    if flags.sampler == 'grid':
      grid = itertools.product(*(one.all() for one in self.space.values()))
      self.points = list(grid)[: flags.trials]
    self.size = len(self.points) or flags.trials or 0
    if not self.size:
      expected = 'a number; only a grid has its own'
      raise ConfigError('--trials', flags.trials, expected)
    self.study = _open(flags)
    self.lock, self.stop = threading.Lock(), threading.Event()
    self.own: set[int] = set()  # trials that this process has taken

  def trials(self) -> list[Any]:
    """Returns the trials that count, in the order of their numbers."""
    trials = self.study.get_trials(deepcopy=False)
    return [trial for trial in trials if 'surplus' not in trial.user_attrs]

  def work(self, slot: int) -> None:
    """Trains trials, until there are enough or `stop` is set."""
    try:
      environment = devices(slot, self.flags.workers)
      while not self.stop.is_set():
        trial = self._take()
        if trial is not None:
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
      trials = self.trials()
      dead = next(filter(self._is_dead, trials), None)
      if dead is not None:
        trial = optuna.Trial(self.study, dead._trial_id)
      elif len(trials) < self.size:
        trial = self.study.ask()
      else:
        return None
      self.own.add(trial.number)
      trial.set_user_attr('owner', f'{HOST}:{os.getpid()}')
      trial.set_user_attr('beat', time.time())
      rank = [t.number for t in self.trials()].index(trial.number)
      if rank >= self.size:  # two processes have asked at once
        trial.set_user_attr('surplus', True)
        self.study.tell(trial, state=TrialState.FAIL)
        return None
      self.study.sampler = self._sampler(rank)
      for key, one in self.space.items():
        one.suggest(key, trial)
      return trial

  def _sampler(self, rank: int) -> Any:
    # Seeded by the trial, so that a resumed search does not repeat values.
    seed = 1000 * self.flags.seed + rank
    if self.flags.sampler == 'grid':
      return _Point(self.space, self.points[rank])
    if self.flags.sampler == 'random':
      return optuna.samplers.RandomSampler(seed)
    # The default, 10 random trials, would leave few of a short search.
    first = max(3, min(10, self.size // 3))
    return optuna.samplers.TPESampler(n_startup_trials=first, seed=seed)

  def _is_dead(self, trial: Any) -> bool:
    """Returns whether a trial runs without a process."""
    if trial.state.is_finished() or trial.number in self.own:
      return False
    host, _, process = trial.user_attrs.get('owner', '').rpartition(':')
    if host == HOST and process != str(os.getpid()):
      try:
        os.kill(int(process), 0)
      except ProcessLookupError:
        return True
    # The same number is that of a process of an earlier container.
    beat = trial.user_attrs.get('beat', trial.datetime_start.timestamp())
    return time.time() - beat > SILENT_SECONDS

  def run_of(self, trial: Any) -> Run:
    """Returns the training of a trial."""
    items = [(k, trial.params[k]) for k in self.space if k in trial.params]
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
    code, is_bad = command_line.OK, False
    if run.result() is None:
      code, is_bad = self._run(trial, run, environment)
    result = run.result() or {}
    if result and metric not in result:
      known = ', '.join(sorted(name for name in result if '/' in name))
      raise ConfigError('--metric', metric, f'in a new workdir one of {known}')
    value, state, reason = result.get(metric), TrialState.COMPLETE, ''
    if is_bad and not result:
      state, reason = TrialState.PRUNED, 'worse than the median'
    elif code in (command_line.PREEMPTED, command_line.INTERRUPTED):
      self.stop.set()
    if self.stop.is_set() and not (result or is_bad):
      trial.set_user_attr('beat', 0.0)  # free for others
      return
    if state == TrialState.COMPLETE and not isinstance(value, float):
      state, reason = TrialState.FAIL, f'{metric} is {value}'
      if not result:
        lines = (run.workdir / 'train.log').read_text(errors='replace')
        reason = f'exit code {code}: {lines.strip().splitlines()[-1:]}'
    trial.set_user_attr('metrics', result)
    trial.set_user_attr('reason', reason)
    number = value if state == TrialState.COMPLETE else None
    self.study.tell(trial, number, state, skip_if_finished=True)
    print(f'{place} {state.name.lower()}: {reason or value}', flush=True)

  def _run(
    self, trial: Any, run: Run, environment: Mapping[str, str]
  ) -> tuple[int, bool]:
    """Runs a training; returns its exit code and whether it was pruned."""
    run.workdir.mkdir(parents=True, exist_ok=True)
    code, is_bad = command_line.LOCKED, False
    # A training whose sweep was killed may still be at work.
    while code == command_line.LOCKED and not self.stop.is_set():
      with (
        (run.workdir / 'train.log').open('a') as log,
        # Own process group: otherwise the child gets Ctrl-C twice.
        subprocess.Popen(
          [sys.executable, *run.command()], env=environment, process_group=0,
          stdout=log, stderr=subprocess.STDOUT,
        ) as process,
      ):  # fmt: skip
        try:
          is_bad = self._watch(trial, run, process)
        finally:
          process.terminate()  # nothing if it has ended
      code = process.returncode
    return code if code >= 0 else 128 - code, is_bad

  def _watch(self, trial: Any, run: Run, process: subprocess.Popen) -> bool:
    """Waits for a training; returns whether to prune it."""
    from eval_lib import plots

    reported = {*self.study.trials[trial.number].intermediate_values}
    beat = 0.0
    while not self.stop.is_set():
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(POLL_SECONDS)
        return False
      if time.time() - beat > BEAT_SECONDS:
        beat = time.time()
        trial.set_user_attr('beat', beat)
      curves: Any = {}
      if self.flags.prune:
        with contextlib.suppress(OSError, ValueError):
          curves = plots.read_curves(run.workdir / 'metrics.jsonl')
      for step, value in zip(*curves.get(self.flags.metric, ()), strict=True):
        if step not in reported:
          reported.add(step)
          trial.report(value, int(step))
          if trial.should_prune():
            return True
    return False

  def report(self) -> None:
    """Prints the table, writes the files and the picture."""
    import numpy as np

    from eval_lib import adaptive_plots

    flags, trials, rows = self.flags, self.trials(), []
    for trial in trials:
      about = trial.user_attrs
      state = f'{trial.state.name.lower()} {about.get("reason", "")}'.strip()
      columns = {'trial': trial.number, 'state': state, **trial.params}
      rows.append((self.run_of(trial), about.get('metrics', {}), columns))
    sweep_runs.report(flags, rows)
    values = np.array([t.value or np.nan for t in trials], float)
    places = {k: [t.params[k] for t in trials] for k in self.space}
    logs = [k for k, one in self.space.items() if one.kind == 'log']
    path = pathlib.Path(flags.workdir, 'sweep.png')
    with adaptive_plots.if_installed():
      is_min = flags.mode == 'min'
      adaptive_plots.plot_trials(
        path, values, places, flags.metric, is_min, logs
      )
      print(f'picture: {path}')


def search(flags: Flags) -> int:
  """Runs a search; returns the exit code."""
  optuna.logging.set_verbosity(optuna.logging.WARNING)
  work = Search(flags)
  with contextlib.ExitStack() as stack:
    for number in (signal.SIGTERM, signal.SIGINT):
      old = signal.signal(number, lambda *_: work.stop.set())
      stack.callback(signal.signal, number, old)
    pool = concurrent.futures.ThreadPoolExecutor(flags.workers)
    stack.enter_context(pool)
    workers = [pool.submit(work.work, slot) for slot in range(flags.workers)]
    for worker in workers:
      worker.result()
  if work.stop.is_set():
    print('stopped; the same command continues', file=sys.stderr)
    return command_line.PREEMPTED
  if not any(t.state == TrialState.COMPLETE for t in work.trials()):
    command_line.fail(f'no trial has finished; see {flags.workdir}/*/train.log')
  work.report()
  return command_line.OK


def devices(slot: int, slots: int) -> dict[str, str]:
  """Returns an environment with the share of devices of one of the slots.

  Without GPUs and TPU chips, it limits the calling thread and its children to
  a share of the cores. Raises ConfigError for more slots than devices.
  """
  environment = dict(os.environ)
  if slots == 1:
    return environment
  for name, pattern in (
    ('CUDA_VISIBLE_DEVICES', '/dev/nvidia[0-9]*'),
    ('TPU_VISIBLE_CHIPS', '/dev/accel[0-9]*'),
  ):
    all_devices = ','.join(map(str, range(len(glob.glob(pattern)))))
    if found := environment.get(name, all_devices):
      share = found.split(',')[slot::slots]
      if not share:
        raise ConfigError('--workers', slots, f'at most one for each of {name}')
      environment[name] = ','.join(share)
      if name.startswith('TPU'):  # one chip: libtpu wants shapes of more
        environment[name] = share[0]
        bounds = 'TPU_PROCESS_BOUNDS', 'TPU_CHIPS_PER_PROCESS_BOUNDS'
        environment |= dict.fromkeys(bounds, '1,1,1')
      return environment
  if hasattr(os, 'sched_setaffinity'):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[slot::slots] or cores)
  return environment


def _open(flags: Flags) -> Any:
  """Opens or creates the study; raises ConfigError if it is another search."""
  journal = pathlib.Path(flags.workdir, 'search.journal')
  journal.parent.mkdir(parents=True, exist_ok=True)
  try:
    storage: Any = flags.storage or optuna.storages.JournalStorage(
      optuna.storages.journal.JournalFileBackend(str(journal))
    )
    study = optuna.create_study(
      study_name=flags.workdir, storage=storage, load_if_exists=True,
      direction={'max': 'maximize', 'min': 'minimize'}[flags.mode],
      pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )  # fmt: skip
  except Exception as error:  # many kinds, of optuna, sqlalchemy and drivers
    where = '--storage' if flags.storage else str(journal)
    raise UsageError(f'{where}: cannot be read: {error}') from error
  names = 'config', 'fixed', 'metric', 'mode', 'sampler', 'vary'
  given = {name: str(getattr(flags, name)) for name in names}
  saved = study.user_attrs.get('flags')
  if saved is None:
    study.set_user_attr('flags', given)
  for name, value in (saved or {}).items():
    if value != given[name]:
      expected = f'{value}, as the search began, or another --workdir'
      raise ConfigError(f'--{name}', given[name], expected)
  return study
