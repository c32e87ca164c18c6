"""A search over ranges of configuration fields with optuna.

The study, in a file or a database, is shared by all processes of a search. Each
thread takes a trial and trains it as a child process in the trial's directory.
A trial whose process has died is taken over and continues in that directory.
"""

import ast
import concurrent.futures
import contextlib
import functools
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
from collections.abc import Iterator, Mapping
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
MOST_TRIED = 64  # values of the other fields to check an end of a range with
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

  Raises ConfigError for an unknown field, and for a value that is illegal with
  all values of the others. What is illegal with some is up to a trial.
  """
  space: dict[str, Range] = {}
  for key, found in map(parse_range, flags.vary):
    if key in space:
      raise ConfigError('--vary', key, 'each field once')
    if flags.sampler == 'grid' and found.kind not in ('int', 'choice'):
      raise ConfigError(f'--vary={key}', found.kind, 'int or choice in a grid')
    space[key] = found
  for key, found in space.items():
    for value in found.values:
      _check(flags, space, f'{key}={value}')
  return space


def _check(flags: Flags, space: Mapping[str, Range], item: str) -> None:
  key = item.partition('=')[0]
  others = [
    [f'{k}={v}' for v in r.values] for k, r in space.items() if k != key
  ]
  refusal = None
  for rest in itertools.islice(itertools.product(*others), MOST_TRIED):
    try:
      sweep_runs.read_config(flags, flags.config, [*flags.fixed, *rest, item])
      return
    except ConfigError as error:
      field = error.field.removeprefix('--config.')
      if field[:2] != '--' and not f'{key}.'.startswith(f'{field}.'):
        return
      refusal = error
  if refusal:
    raise refusal


def grid(space: Mapping[str, Range]) -> list[dict[str, Any]]:
  """Returns all combinations; the last field changes first."""
  values = (
    r.values if r.kind == 'choice' else range(r.values[0], r.values[1] + 1)
    for r in space.values()
  )
  points = itertools.product(*values)
  return [dict(zip(space, point, strict=True)) for point in points]


class _Point(optuna.samplers.RandomSampler):
  """Samples a point that is given."""

  def __init__(self, point: Mapping[str, Any]):
    super().__init__()
    self.point = point

  def sample_independent(
    self, study: Any, trial: Any, param_name: str, param_distribution: Any
  ) -> Any:
    return self.point[param_name]


class Search:
  """A study, and the trials of it that this process trains."""

  def __init__(self, flags: Flags):
    """Checks the space and opens the study."""
    self.flags, self.space = flags, read_space(flags)
    self.points = grid(self.space) if flags.sampler == 'grid' else []
    self.points = self.points[: flags.trials]
    self.size = len(self.points) or flags.trials or 0
    if not self.size:
      expected = 'a number; only a grid has its own'
      raise ConfigError('--trials', flags.trials, expected)
    name = flags.metric.partition('/')[0]
    config = command_line.load_config(flags.config, flags.fixed)
    if flags.prune and not config.evals[name].get('every_steps', 0):
      expected = f'no --prune without evals.{name}.every_steps'
      raise ConfigError('--prune', True, expected)
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
        elif all(t.state != TrialState.RUNNING for t in self.trials()):
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
      # Seeded by its number, so that no two trials are equal.
      seed = 1000 * self.flags.seed + trial.number
      if self.points:
        self.study.sampler = _Point(self.points[rank])
      elif self.flags.sampler == 'random':
        self.study.sampler = optuna.samplers.RandomSampler(seed)
      else:
        # The default, 10 random trials, would leave few of a short search.
        first = max(3, min(10, self.size // 3))
        tpe = optuna.samplers.TPESampler
        self.study.sampler = tpe(n_startup_trials=first, seed=seed)
      for key, one in self.space.items():
        one.suggest(key, trial)
      return trial

  def _is_dead(self, trial: Any) -> bool:
    """Returns whether a trial runs without a process."""
    if trial.state != TrialState.RUNNING or trial.number in self.own:
      return False
    host, _, process = trial.user_attrs.get('owner', '').rpartition(':')
    if host == HOST and not _is_alive(int(process)):
      return True
    started = trial.datetime_start.timestamp()
    beat = trial.user_attrs.get('beat', started)
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
    flags, run = self.flags, self.run_of(trial)
    place = f'[{trial.number + 1}/{self.size}]'
    print(f'{place} {run.name}', flush=True)
    tell = functools.partial(self.study.tell, trial, skip_if_finished=True)
    code, reason = command_line.OK, ''
    result, is_bad = run.result(), False
    if result is None:
      code, is_bad = self._run(trial, run, environment)
      result = run.result()
    if result is not None:
      if flags.metric not in result:
        known = ', '.join(sorted(name for name in result if '/' in name))
        expected = f'one of {known}; use another workdir'
        raise ConfigError('--metric', flags.metric, expected)
      finite = {k: v for k, v in result.items() if isinstance(v, float)}
      trial.set_user_attr('metrics', finite)
      if flags.metric in finite:
        tell(finite[flags.metric])
        print(f'{place} {flags.metric} {finite[flags.metric]:.4g}', flush=True)
        return
      reason = f'{flags.metric} is {result[flags.metric]}'
    elif is_bad:
      trial.set_user_attr('reason', 'below the median')
      tell(state=TrialState.PRUNED)
      print(f'{place} pruned', flush=True)
      return
    elif self.stop.is_set():
      trial.set_user_attr('beat', 0.0)
      return
    reason = reason or f'exit code {code}: {_last_line(run)}'
    trial.set_user_attr('reason', reason)
    tell(state=TrialState.FAIL)
    print(f'{place} {reason}', file=sys.stderr, flush=True)

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
      code = code if code >= 0 else 128 - code
    return code, is_bad

  def _watch(self, trial: Any, run: Run, process: subprocess.Popen) -> bool:
    """Waits for a training; returns whether it was pruned."""
    from eval_lib import plots

    frozen = self.study.trials[trial.number]
    reported, beat, is_bad = {*frozen.intermediate_values}, 0.0, False
    while not (is_bad or self.stop.is_set()):
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(POLL_SECONDS)
        return False
      if time.monotonic() - beat > BEAT_SECONDS:
        beat = time.monotonic()
        trial.set_user_attr('beat', time.time())
      curves: Any = {}
      if self.flags.prune:
        with contextlib.suppress(OSError, ValueError):
          curves = plots.read_curves(run.workdir / 'metrics.jsonl')
      steps, values = curves.get(self.flags.metric, ((), ()))
      for step, value in zip(steps, values, strict=True):
        if step not in reported:
          reported.add(step)
          trial.report(float(value), int(step))
          is_bad = is_bad or trial.should_prune()
    return is_bad

  def report(self) -> None:
    """Prints the table, writes the files and the picture."""
    trials = [t for t in self.trials() if len(t.params) == len(self.space)]
    rows, values = [], []
    for trial in trials:
      metrics = trial.user_attrs.get('metrics', {})
      reason = trial.user_attrs.get('reason', '')
      state = ': '.join(filter(None, [trial.state.name.lower(), reason]))
      about = {'trial': trial.number, 'state': state, **trial.params}
      rows.append((self.run_of(trial), metrics, about))
      values.append(metrics.get(self.flags.metric, float('nan')))
    sweep_runs.report(self.flags, rows)
    places = {k: [t.params[k] for t in trials] for k in self.space}
    logs = [k for k, one in self.space.items() if one.kind == 'log']
    _draw(self.flags, values, places, logs)


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
  work.report()
  if not any(t.state == TrialState.COMPLETE for t in work.trials()):
    command_line.fail('no trial has finished; see the column state')
  return command_line.OK


def devices(slot: int, slots: int) -> dict[str, str]:
  """Returns an environment with the share of devices of one of the slots.

  Without GPUs and TPU chips, it limits the calling thread and its children to
  a share of the cores. Raises ConfigError for more slots than devices.
  """
  environment = dict(os.environ)
  for variable, pattern in (
    ('CUDA_VISIBLE_DEVICES', '/dev/nvidia[0-9]*'),
    ('TPU_VISIBLE_CHIPS', '/dev/accel[0-9]*'),
  ):
    found = [str(n) for n in range(len(glob.glob(pattern)))]
    given = os.environ.get(variable, ','.join(found))
    if slots > 1 and (names := [n for n in given.split(',') if n]):
      if slots > len(names):
        raise ConfigError('--workers', slots, f'1 to {len(names)}: {variable}')
      share = names[slot::slots]
      environment[variable] = ','.join(share)
      if variable.startswith('TPU'):  # libtpu needs the shape of the share
        bounds = {1: '1,1,1', 2: '1,2,1', 4: '2,2,1'}.get(len(share), '')
        environment['TPU_CHIPS_PER_PROCESS_BOUNDS'] = bounds
        environment['TPU_PROCESS_BOUNDS'] = '1,1,1'
      return environment
  if slots > 1 and hasattr(os, 'sched_setaffinity'):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[slot::slots] or cores)
  return environment


def _is_alive(process: int) -> bool:
  if process == os.getpid():  # of an earlier container
    return False
  try:
    os.kill(process, 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    return True
  return True


def _last_line(run: Run) -> str:
  text = (run.workdir / 'train.log').read_text(errors='replace')
  return (text.strip().splitlines() or [''])[-1].removeprefix('error: ')


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
  given = {n: getattr(flags, n) for n in names}
  given |= {n: list(v) for n, v in given.items() if isinstance(v, tuple)}
  saved = study.user_attrs.get('flags')
  if saved is None:
    study.set_user_attr('flags', given)
  for name, value in (saved or {}).items():
    if value != given[name]:
      expected = f'{value!r}, as the search began, or another --workdir'
      raise ConfigError(f'--{name}', given[name], expected)
  return study


def _draw(flags: Flags, values: Any, places: Any, logs: Any) -> None:
  import numpy as np

  from eval_lib import adaptive_plots, report

  values = np.array(values, float)
  if not np.isfinite(values).any():
    return
  path = pathlib.Path(flags.workdir, 'sweep.png')
  label = report.names(flags.names).get(flags.metric, flags.metric)
  with adaptive_plots.if_installed():
    is_min = flags.mode == 'min'
    adaptive_plots.plot_trials(path, values, places, label, is_min, logs)
    print(f'picture: {path}')
