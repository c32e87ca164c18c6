"""The directory of a run: its lock, its configuration and its results.

Only the primary process of a run holds the lock and writes.
"""

import contextlib
import dataclasses
import errno
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from core import fields, files
from core.errors import ConfigError, InvalidDataError, UserError
from core.files import Path, writing
from dataset_lib import contract
from dataset_lib.source import DatasetInfo

CHECKPOINTS = 'checkpoints'
CONFIG = 'config.json'
DATASET_INFO = 'dataset_info.json'
METRICS = 'metrics.jsonl'
MANIFEST = 'manifest.json'  # of a checkpoint
# Folders that are written to, which may be no links.
WRITTEN = (
  'profile', 'profile/plugins', 'profile/plugins/profile', 'tensorboard',
  'submission', f'{CHECKPOINTS}/set_aside',
)  # fmt: skip
TOKENIZER = 'tokenizer.json'  # of a run on texts
# Fields that may differ on resume.
HARMLESS = re.compile(
  r'log_every|tensorboard|num_micro|max_nonfinite_steps|watchdog_seconds|'
  r'allow_other_rows|phases\.\d+\.name|'
  r'(loader|checkpoint|evals|mesh|profile|blocks)\..*'
)
# A run renews run.lock, as not all file systems lock across hosts: another host
# watches its times change. NFS shows changes after up to 60 s.
BEAT_SECONDS, WATCH_SECONDS = 10.0, 75.0


class RunLockedError(UserError, RuntimeError):
  """Another run works in the directory."""

  exit_code = 5


class ConfigChangedError(UserError, ValueError):
  """The directory belongs to a run of another configuration; names the keys."""


class RunDirectory(contextlib.ExitStack):
  """A context in which a run owns its directory.

  With checkpoints the configuration must be the saved one, and the data `info`
  those the run was trained on. Only one process is `primary`. Entering raises
  RunLockedError, ConfigChangedError, InvalidDataError and WriteError. After a
  UserError a directory that was made, and has no step, is removed.
  """

  def __init__(
    self,
    workdir: Path,
    config: Mapping[str, Any],
    primary: bool = True,
    info: DatasetInfo | None = None,
  ):
    super().__init__()
    self.workdir = pathlib.Path(workdir).absolute()
    self._config, self._primary, self._info = config, primary, info

  def __enter__(self) -> 'RunDirectory':
    is_new = not self.workdir.exists()
    with writing(self.workdir):
      self.workdir.mkdir(parents=True, exist_ok=True)
    if self._primary:
      with contextlib.ExitStack() as opened:
        opened.enter_context(_locked(self.workdir))
        if is_new:
          opened.push(self._remove_unused)
        self._check_config()
        self.write(CONFIG, self._config)
        if self._info is not None:
          self.write(DATASET_INFO, dataclasses.asdict(self._info))
        self.write('versions.json', versions())
        self.push(opened.pop_all())
    return self

  def _remove_unused(self, kind: type[BaseException] | None, *_: Any) -> None:
    saved = self.workdir / CHECKPOINTS, self.workdir / METRICS
    has_steps = any(saved[0].glob('*')) or saved[1].exists()
    if kind and issubclass(kind, UserError) and not has_steps:
      shutil.rmtree(self.workdir, ignore_errors=True)

  def write(self, name: str, value: Mapping[str, Any]) -> None:
    """Writes a JSON file of the run atomically."""
    if self._primary:
      files.write_json(self.workdir / name, value)

  def log(self, step: int, values: Mapping[str, Any]) -> None:
    """Appends a line of metrics; it is in the file when this returns."""
    if self._primary:
      line = files.dumps({'step': step, **values}) + '\n'
      path = self.workdir / METRICS
      # One write: a killed process leaves at most this line incomplete.
      with writing(path), files.open_append(path) as file:
        size = file.tell()
        if file.write(line.encode()) != len(line.encode()):
          file.truncate(size)  # no part of a line
          raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  def truncate_log(self, step: int) -> None:
    """Removes the lines of later steps, and damaged lines with a warning."""
    path = self.workdir / METRICS
    if not self._primary or not path.exists():
      return
    # The last line may be incomplete and still parse; dropped without warning.
    *lines, _ = files.read_bytes(path, files.MAX_LOG).split(b'\n')
    kept = []
    for number, line in enumerate(lines, 1):
      try:
        if files.loads(line.decode())['step'] <= step:
          kept.append(line.decode() + '\n')
      except (ValueError, TypeError, LookupError):
        message = f'{path}: line {number} is damaged, dropped'
        warnings.warn(message, stacklevel=2)
    files.write_text(path, ''.join(kept))

  def _check_config(self) -> None:
    path, checkpoints = self.workdir / CONFIG, self.workdir / CHECKPOINTS
    other = checkpoints.resolve().parent
    if other != self.workdir.resolve() and (other / CONFIG).exists():
      line = f'is a link to those of {other}, which training would delete'
      raise InvalidDataError(f'{checkpoints} {line}')
    for name in WRITTEN:
      files.check_no_link(self.workdir / name)
    if steps := steps_in(checkpoints):
      if not path.exists():
        raise ConfigChangedError(
          f'{path} is missing, so the configuration of the checkpoints {steps} '
          'cannot be compared: put it back, or use another workdir.'
        )
      saved = files.read_object(path)
      self._refuse(
        'with another configuration', changes(saved, self._config),
        'Use the saved values, use another workdir, or edit '
        f'{path} to resume with the new ones deliberately.',
      )  # fmt: skip
    if self._info and (trained := trained_on(self.workdir)):
      rows = () if self._config['allow_other_rows'] else contract.ROWS
      diffs = contract.differences(trained, self._info, (*contract.ALL, *rows))
      self._refuse(
        'on other data', map(str, diffs),
        'Restore the data or use another workdir; allow_other_rows=True '
        'continues with other rows, and keeps the schedule.',
      )  # fmt: skip

  def _refuse(self, what: str, different: Iterable[str], advice: str) -> None:
    if lines := '\n  '.join(different):
      raise ConfigChangedError(
        f'{self.workdir} has checkpoints of a run {what}:\n  {lines}\n{advice}'
      )


@contextlib.contextmanager
def _locked(workdir: pathlib.Path) -> Iterator[None]:
  """Locks a run; the kernel frees the lock of a killed process.

  `run.lock` names the holder. For other hosts, and where directories cannot be
  locked, it holds while it is renewed.
  """
  path, host = workdir / 'run.lock', socket.gethostname()
  files.check_replaceable(path)
  with contextlib.ExitStack() as held:
    known_host = host  # of this host the kernel knows whether a run is alive
    try:
      held.callback(os.close, files.lock_directory(workdir))
    except BlockingIOError:
      raise RunLockedError(_in_use(path)) from None
    except OSError:
      known_host = ''
    if _holder(path)[0] not in ('', known_host) and _is_renewed(path):
      raise RunLockedError(_in_use(path))
    started = time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())
    holder = {'pid': os.getpid(), 'host': host, 'started': started}
    text, done = files.dumps(holder), threading.Event()
    with writing(path):
      path.write_text(text)
    beat = threading.Thread(target=_renew, args=(path, text, done), daemon=True)
    beat.start()
    try:
      yield
    finally:
      done.set()
      beat.join()
      with contextlib.suppress(OSError):
        path.write_text('')


def _is_renewed(path: pathlib.Path) -> bool:
  """Watches whether the run that wrote a lock is alive."""
  watching = f'watching for {WATCH_SECONDS:.0f} s whether that run is alive'
  print(f'{path} is of {_holder(path)[1]}; {watching}', file=sys.stderr)
  before, end = path.stat().st_mtime_ns, time.monotonic() + WATCH_SECONDS
  while time.monotonic() < end:
    time.sleep(min(1.0, WATCH_SECONDS / 10))
    # Reading makes NFS ask the server. A run that ends leaves no holder.
    if not path.exists() or not _holder(path)[0]:
      return False
    if path.stat().st_mtime_ns != before:
      return True
  return False


def _renew(path: pathlib.Path, text: str, done: threading.Event) -> None:
  """Renews a lock until `done`; ends the process if another run has it."""
  while not done.wait(BEAT_SECONDS):
    with contextlib.suppress(OSError):  # a full disk is no reason to end
      if not path.exists():  # deleted by hand
        path.write_text(text)
      # An empty one is being written.
      if path.read_text() not in (text, ''):
        line = f'error: another run took the directory: {_in_use(path)}\n'
        os.write(2, line.encode())
        os._exit(RunLockedError.exit_code)
      os.utime(path)


def _in_use(lock: pathlib.Path) -> str:
  holder = _holder(lock)[1]
  return f'{lock.parent} is in use by {holder}: stop it or use another workdir'


def _holder(lock: pathlib.Path) -> tuple[str, str]:
  """Returns the host of the run that wrote a lock file, and its description."""
  with contextlib.suppress(OSError, InvalidDataError, KeyError):
    holder = files.read_object(lock)
    text = 'process {pid} on host {host}, started {started}'.format(**holder)
    return str(holder['host']), files.printable(text)
  return '', 'a process that is just starting'


def load_info(workdir: Path) -> DatasetInfo:
  """Returns the contract of a run; raises the errors of `damage_of`."""
  path = pathlib.Path(workdir) / DATASET_INFO
  with files.damage_of(path):
    return parse_info(files.read_object(path))


def parse_info(content: Mapping[str, Any]) -> DatasetInfo:
  """Returns a contract from JSON; raises ValueError for an illegal one."""
  values = fields.check(DatasetInfo, content, '')
  shape, mean, std = (values[k] for k in ('input_shape', 'mean', 'std'))
  if min(shape, default=0) < 1:
    raise ValueError(f'input_shape: got {shape}')
  if len(mean) != len(std) or len(mean) not in (1, shape[-1]):
    raise ValueError(f'mean, std: got {mean}, {std}')
  return DatasetInfo(**files.with_tuples(values))


def trained_on(workdir: Path) -> DatasetInfo | None:
  """Returns the contract of a run or of checkpoints; None if not known."""
  folder = pathlib.Path(workdir)
  folder = folder.parent if folder.name == CHECKPOINTS else folder
  checkpoints = folder / CHECKPOINTS
  checkpoints = checkpoints if checkpoints.is_dir() else folder
  steps = steps_in(checkpoints)
  if steps and (folder / DATASET_INFO).exists():
    return load_info(folder)
  for step in reversed(steps):  # copied or left without the rest of their run
    with contextlib.suppress(*files.DAMAGE):  # which restoring reports
      manifest = files.read_object(checkpoints / str(step) / MANIFEST)
      return parse_info(manifest['content']['extra']['contract'])
  return None


def steps_in(checkpoints: pathlib.Path) -> list[int]:
  """Returns the steps that have a complete checkpoint, ascending."""
  names = (path.name for path in checkpoints.glob('*'))
  return sorted(int(name) for name in names if name.isdecimal())


def changes(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
  """Lists differences of two configurations, except of `HARMLESS` fields.

  A field that is not saved has its default, as it may be newer than the run,
  unless the saved configuration is no longer legal, e.g. its teacher moved.
  """
  from train_lib import config_schema  # imports jax, which a lock does not need

  with contextlib.suppress(ConfigError, InvalidDataError):
    saved = config_schema.validate(saved).to_dict()
  old, new = map(_flat, (saved, given))
  return [
    f'{k}: saved {old.get(k, "nothing")}, given {new.get(k, "nothing")}'
    for k in sorted(old.keys() | new.keys())
    if old.get(k) != new.get(k) and not HARMLESS.fullmatch(k)
  ]


def _flat(config: Any) -> dict[str, str]:
  """Returns the JSON of each field, by its dotted name."""
  plain = files.with_tuples(json.loads(files.dumps(config)))
  return {name: files.dumps(value) for name, value in fields.flat(plain)}


def versions() -> dict[str, Any]:
  """Returns versions of packages, Python, system and code."""
  installed = importlib.metadata.distributions()
  changed = _git('status', '--porcelain', '--untracked-files=no')
  dirty = None if changed is None else bool(changed)
  return {
    'python': platform.python_version(),
    'platform': platform.platform(),
    # The name is None in a damaged installation.
    'packages': dict(sorted((d.name, d.version) for d in installed if d.name)),
    'git': {'revision': _git('rev-parse', 'HEAD'), 'dirty': dirty},
  }


def _git(*arguments: str) -> str | None:
  """Runs git in this checkout; None if that fails."""
  command = ('git', '-C', str(pathlib.Path(__file__).parents[1]), *arguments)
  how: Any = dict(capture_output=True, check=True, text=True, timeout=10)
  with contextlib.suppress(OSError, subprocess.SubprocessError):
    return subprocess.run(command, **how).stdout.strip()
  return None
