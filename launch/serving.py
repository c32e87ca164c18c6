"""What `launch.predict` and `launch.serve` share: flags, engine, log."""

import contextlib
import dataclasses
import json
import sys
import threading
from collections.abc import Iterator
from typing import Annotated, Any

from annotated_types import Interval

from core import files
from core.errors import ConfigError
from core.fields import flag
from launch import command_line
from launch.command_line import Count, Sizes

CACHE = 'programs'  # in the user's cache folder
MAX_THREADS = 16  # programs compiled at a time; each takes memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlags(command_line.RunFlags):
  """Flags of what is served: a run, its options, its buckets."""

  serve: str = flag(
    'such as tau=0.8 of an EAT, iterations=6 of an ALBERT', '', 'KEY=VALUE,...'
  )
  thresholds: str = flag('of an EAT, instead of tau', '', 'SOURCE=TAU,...')
  minimum_retention: str = flag('of an EAT', '', 'SOURCE=SHARE,...')
  lengths: Sizes | None = flag(
    "length buckets, cut at the last (default: the run's)", None, 'TOKENS,...'
  )
  batches: Sizes = flag('batch buckets', (1, 2, 4, 8, 16, 32), 'ROWS,...')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command_line.ThreadFlags, ModelFlags):
  """Flags of serving."""

  workdir: str = flag('directory of the run', '', 'DIRECTORY')
  bundle: str = flag(
    'instead of a run, as written by launch.export --bundle', '', 'FILE'
  )
  max_pending: Annotated[int, Interval(ge=1, le=10**7)] = flag(
    'rows without an answer; best a multiple of the largest batch', 256, 'ROWS'
  )
  max_pool_bytes: Count = flag(
    'device memory of rows between stages; 0 (default) for no limit', 0, 'BYTES'
  )
  compilation_cache: str = flag(
    'compiled programs, which the next start runs: keep it private; or none '
    '(default: in the cache folder of the user)',
    '',
    'DIRECTORY',
  )
  log_every: Annotated[float, Interval(ge=0.0, le=1e6)] = flag(
    'running statistics on stderr; 0 for only at the end', 60.0, 'SECONDS'
  )

  def __post_init__(self):
    if not self.workdir and not self.bundle:
      raise ConfigError('workdir', '', 'a run, or --bundle=FILE')
    if self.bundle:
      names = [field.name for field in dataclasses.fields(ModelFlags)]
      expected = 'nothing beside --bundle, whose file determines it'
      command_line.refuse(self, names, expected)


def build_engine(flags: Flags) -> Any:
  """Returns an engine that compiles what its input needs."""
  engine = load_engine(flags, lazy=True)
  warm_up(engine, flags)
  return engine


def load_engine(flags: Flags, lazy: bool = False) -> Any:
  """Returns the engine, not yet compiled; see `Engine` for `lazy`."""
  if flags.bundle:
    from serve_lib import bundle

    chain, policy, grid = bundle.read(flags.bundle, log_drift)
  else:
    chain, policy, grid = load_run(flags)
  from serve_lib.engine import Engine

  for warning in policy.warnings:
    log(f'warning: {warning}')
  return Engine(
    chain, policy, grid.lengths, grid.batches, lazy=lazy,
    max_pending=flags.max_pending, max_pool_bytes=flags.max_pool_bytes,
    cache_directory=cache_directory(flags.compilation_cache),
  )  # fmt: skip


def load_run(flags: ModelFlags) -> tuple[Any, Any, Any]:
  """Returns chain, policy and `Grid` of a run."""
  options: dict[str, Any] = {}
  for name in ('serve', 'thresholds', 'minimum_retention'):
    if text := getattr(flags, name):
      values = command_line.parse_fields(f'--{name}', text)
      options |= values if name == 'serve' else {name: values}
  from serve_lib.chain import Grid
  from train_lib import loading

  chain, policy, buckets = loading.serve(
    flags.workdir, step=flags.step, options=options, on_drift=log_drift,
    lengths=flags.lengths and sorted(set(flags.lengths)),
  )  # fmt: skip
  return chain, policy, Grid(tuple(buckets), tuple(sorted(set(flags.batches))))


def warm_up(engine: Any, flags: Flags) -> None:
  """Compiles the programs of an engine, on stderr with their progress."""
  from dataset_lib.builder import default_num_threads

  cache = cache_directory(flags.compilation_cache)
  kept = f'kept in {cache}' if cache else 'not kept for the next start'
  threads = min(default_num_threads(), MAX_THREADS)
  try:
    done = engine.warm_up(progress=True, threads=threads)
  except Exception as error:
    if not flags.bundle:
      raise
    from serve_lib.bundle import BundleError

    message = f'{flags.bundle}: a program cannot be compiled: {error}'
    raise BundleError(message) from error
  if not done.programs:
    log(f'programs are compiled when they are first needed, {kept}')
    return
  if done.backend == 'onnxruntime':
    kept = 'made anew at each start'
  log(
    f'compiled {done.programs} programs in {done.seconds:.1f} s, {kept}; '
    f'they run in {done.backend}'
  )


def cache_directory(flag: str) -> str:
  """Returns the directory of compiled programs, '' for none."""
  from serve_lib import program_cache

  if flag:
    return '' if flag == 'none' else flag
  name = program_cache.of_cores(CACHE)
  return program_cache.own_folder(name)


def log(line: str) -> None:
  """Prints a line on stderr."""
  with contextlib.suppress(OSError):  # stderr may be closed
    print(files.printable(line), file=sys.stderr, flush=True)


def log_drift(drifted: bool, report: dict[str, Any]) -> None:
  """Logs that drift begins or ends."""
  begun = 'the traffic is not as calibrated; every row runs to full depth'
  now = begun if drifted else 'over; rows leave early again'
  log(f'drift: {now}: {json.dumps(report)}')


@contextlib.contextmanager
def statistics(engine: Any, seconds: float) -> Iterator[None]:
  """Logs statistics of an engine every `seconds` (0: never), at the end.

  Not again while no row is answered and none fails.
  """
  done = threading.Event()

  def repeat():
    logged: Any = (0, {})
    while not done.wait(seconds or None):
      found = engine.monitor.snapshot()
      counts = found['answers'], found['failures']
      if counts != logged:
        log(json.dumps(found))
      logged = counts

  thread = threading.Thread(target=repeat, name='statistics')
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()
  log(json.dumps(engine.monitor.snapshot()))
