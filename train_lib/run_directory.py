"""The directory of a run: its lock, its configuration and its results.

`run.lock` keeps a second run out, `config.json` and `versions.json` record
what ran, `dataset_info.json` the shapes and classes of its data,
`metrics.jsonl` one JSON object per logged step, `result.json` the final
metrics. Only the primary process of a run holds the lock and writes.
"""

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import re
import socket
import subprocess
import time
from collections.abc import Collection, Mapping
from typing import Any

import filelock

from dataset_lib.errors import InvalidDataError
from train_lib import strict_json

CHECKPOINTS = 'checkpoints'
DATASET_INFO = 'dataset_info.json'
TOKENIZER = 'tokenizer.json'  # of a run on texts
# Fields that may differ when a run is resumed: they change where, how fast
# and how often, but not what is computed.
HARMLESS = (
  'log_every', 'tensorboard', 'num_micro', 'max_nonfinite_steps',
  r'(loader|checkpoint|evals|mesh|profile)\..*',
)  # fmt: skip
# A lock of another host counts as held while its run wrote something within
# this time: some file systems do not lock across hosts.
FOREIGN_LOCK_SECONDS = 120.0


class RunLockedError(RuntimeError):
  """Another run works in the directory; names its pid, host and start."""


class ConfigChangedError(ValueError):
  """The directory belongs to a run of another configuration; names the keys."""


class RunDirectory:
  """A context in which a run owns its directory.

  Attributes:
    workdir: the directory, absolute.
    metrics: writer of `metrics.jsonl`.

  Args:
    workdir: the directory of all files of the run; it is created.
    config: the resolved configuration. It is written to `config.json`, and
      compared with the saved one if the directory has checkpoints.
    primary: False in all processes of a run but one; they write nothing.

  Raises (on entering):
    RunLockedError: another run is using the directory.
    ConfigChangedError: the directory has checkpoints of another run.
    InvalidDataError: the saved configuration is damaged.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    config: Mapping[str, Any],
    primary: bool = True,
  ):
    self.workdir = pathlib.Path(workdir).absolute()
    self.metrics = strict_json.Metrics(self.path('metrics.jsonl'), primary)
    self._config, self._primary = config, primary
    # The kernel releases the lock of a killed process; the JSON content only
    # names the holder.
    self._lock = filelock.FileLock(self.path('run.lock'), timeout=0)

  def __enter__(self) -> 'RunDirectory':
    self.workdir.mkdir(parents=True, exist_ok=True)
    if self._primary:
      self._acquire()
      try:
        self._write_config()
        strict_json.write(self.path('versions.json'), versions())
      except BaseException:
        self._lock.release()
        raise
    return self

  def __exit__(self, *exception: object) -> None:
    if self._primary:
      with contextlib.suppress(OSError):
        self.path('run.lock').write_text('')
      self._lock.release()

  def path(self, name: str) -> pathlib.Path:
    """Returns the path of a file or folder of the run.

    Raises:
      ValueError: if the name leads out of the directory.
    """
    path = self.workdir / name
    if not path.resolve().is_relative_to(self.workdir.resolve()):
      raise ValueError(
        f'{name!r} leads out of the run directory {self.workdir}; give a '
        'relative name without ..'
      )
    return path

  def write(self, name: str, value: Mapping[str, Any]) -> None:
    """Writes a JSON file of the run atomically."""
    if self._primary:
      strict_json.write(self.path(name), value)

  def _acquire(self) -> None:
    path, host = self.path('run.lock'), socket.gethostname()
    try:
      self._lock.acquire()
    except filelock.Timeout:
      raise RunLockedError(self._in_use(_holder(path))) from None
    except OSError as error:
      raise InvalidDataError(f'{path} cannot be locked ({error})') from error
    holder = _holder(path)
    written = [
      file.stat().st_mtime for file in (path, self.metrics.path)
      if file.exists()
    ]  # fmt: skip
    age = time.time() - max(written)
    if holder.get('host', host) != host and age < FOREIGN_LOCK_SECONDS:
      self._lock.release()
      raise RunLockedError(
        f'{self._in_use(holder)} It wrote its last file {age:.0f} s ago; if '
        f'it has ended, start again after {FOREIGN_LOCK_SECONDS:.0f} s, or '
        f'delete {path}.'
      )
    started = time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())
    fields = {'pid': os.getpid(), 'host': host, 'started': started}
    path.write_text(strict_json.dumps(fields))

  def _in_use(self, holder: Mapping[str, Any]) -> str:
    name = 'a process that is just starting'
    if holder:
      name = (
        f'process {holder.get("pid")} on host {holder.get("host")}, started '
        f'{holder.get("started")}'
      )
    return (
      f'{self.workdir} is in use by {name}. Two runs in one directory '
      'overwrite each other: stop that run or use another workdir.'
    )

  def _write_config(self) -> None:
    path = self.path('config.json')
    config = strict_json.loads(strict_json.dumps(self._config))
    if has_checkpoints(self.workdir) and path.exists():
      changed = changes(strict_json.read_object(path), config)
      if changed:
        raise ConfigChangedError(
          f'{self.workdir} has checkpoints of a run with another '
          'configuration:\n  ' + '\n  '.join(changed) + '\nUse the saved '
          f'values, use another workdir, or edit {path} to resume with the '
          'new ones deliberately.'
        )
    if path.is_dir():
      raise InvalidDataError(f'{path} is damaged (it is a directory)')
    strict_json.write(path, config)


def has_checkpoints(workdir: str | os.PathLike[str]) -> bool:
  """Returns whether a run in this directory has saved a step."""
  directory = pathlib.Path(workdir) / CHECKPOINTS
  return directory.is_dir() and any(
    path.name.isdecimal() for path in directory.iterdir()
  )


def changes(
  saved: Mapping[str, Any],
  given: Mapping[str, Any],
  harmless: Collection[str] = HARMLESS,
) -> list[str]:
  """Lists the differences of two configurations, except harmless fields.

  Returns:
    Lines like 'optimizer.lr: saved 0.1, given 0.2', sorted.
  """
  before, after = _flat(saved), _flat(given)
  absent = 'nothing'
  return [
    f'{key}: saved {before.get(key, absent)}, given {after.get(key, absent)}'
    for key in sorted(before.keys() | after.keys())
    if before.get(key, absent) != after.get(key, absent)
    and not any(re.fullmatch(pattern, key) for pattern in harmless)
  ]


def _flat(tree: Any, prefix: str = '') -> dict[str, str]:
  if not isinstance(tree, Mapping) or (prefix and not tree):
    return {prefix.rstrip('.'): strict_json.dumps(tree)}
  flat: dict[str, str] = {}
  for key, value in tree.items():
    flat |= _flat(value, f'{prefix}{key}.')
  return flat


def versions() -> dict[str, Any]:
  """Returns versions of packages, Python, system and this code.

  Imports none of the packages, so no device is touched.
  """
  packages = {
    distribution.name: distribution.version
    for distribution in importlib.metadata.distributions()
    if distribution.name  # None in a damaged installation
  }
  status = _git('status', '--porcelain', '--untracked-files=no')
  return {
    'python': platform.python_version(),
    'platform': platform.platform(),
    'packages': dict(sorted(packages.items())),
    'git': {
      'revision': _git('rev-parse', 'HEAD'),
      'dirty': None if status is None else bool(status),
    },
  }


def _git(*arguments: str) -> str | None:
  """Runs git in this checkout; None if that fails."""
  root = str(pathlib.Path(__file__).resolve().parents[1])
  try:
    return subprocess.run(
      ('git', '-C', root, *arguments),
      capture_output=True,
      check=True,
      text=True,
      timeout=10,
    ).stdout.strip()
  except (OSError, subprocess.SubprocessError):
    return None


def _holder(path: pathlib.Path) -> dict[str, Any]:
  """Returns the fields of a lock file, empty if it holds no such text."""
  try:
    return strict_json.read_object(path)
  except (OSError, InvalidDataError):
    return {}
