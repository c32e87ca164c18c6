"""The directory of a run: its lock, what it was made of, what came out.

`run.lock` keeps a second run out, `config.json` and `versions.json` say what
ran, `dataset_info.json` on what kind of data, `metrics.jsonl` has one JSON
object a step, `result.json` is the end.
Only the primary process of a run holds the lock and writes.
"""

import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
from collections.abc import Collection, Mapping
from typing import Any

from train_lib import strict_json
from train_lib.metrics_file import Metrics
from train_lib.run_lock import Lock, RunLockedError

__all__ = [
  'CHECKPOINTS',
  'DATASET_INFO',
  'HARMLESS',
  'TOKENIZER',
  'ConfigChangedError',
  'RunDirectory',
  'RunLockedError',
  'changes',
  'versions',
]

CHECKPOINTS = 'checkpoints'
DATASET_INFO = 'dataset_info.json'
TOKENIZER = 'tokenizer.json'  # of a run on texts
# Fields that may differ when a run goes on: they change where, how fast and
# how often, but not what is computed.
HARMLESS = (
  r'log_every',
  r'tensorboard',
  r'num_micro',
  r'max_nonfinite_steps',
  r'loader\..*',
  r'checkpoint\..*',
  r'evals\..*',
  r'mesh\..*',
  r'profile\..*',
)
PACKAGES = (
  'jax',
  'jaxlib',
  'flax',
  'optax',
  'orbax-checkpoint',
  'grain',
  'numpy',
  'ml_collections',
  'opencv-python-headless',
  'tensorflow',
  'tensorflow-datasets',
  'tokenizers',
  'safetensors',
)


class ConfigChangedError(ValueError):
  """The directory belongs to a run of another configuration; names the keys."""


class RunDirectory:
  """A context in which a run owns its directory.

  Attributes:
    workdir: the directory, absolute.
    metrics: writer of `metrics.jsonl`.

  Args:
    workdir: where everything of the run goes; it is created.
    config: the resolved configuration. It is written to `config.json`, and
      compared with what stands there if the directory has checkpoints.
    primary: False in all processes of a run but one; they write nothing.

  Raises (on entering):
    RunLockedError: another run is at work in the directory.
    ConfigChangedError: the directory has checkpoints of another run.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    config: Mapping[str, Any],
    primary: bool = True,
  ):
    self.workdir = pathlib.Path(workdir).absolute()
    self.metrics = Metrics(self.path('metrics.jsonl'), primary)
    self._config, self._primary = config, primary
    self._lock = Lock(self.path('run.lock'), self.metrics.path)

  def __enter__(self) -> 'RunDirectory':
    self.workdir.mkdir(parents=True, exist_ok=True)
    if self._primary:
      self._lock.acquire()
      try:
        self._write_config()
        strict_json.write(self.path('versions.json'), versions())
      except BaseException:
        self._lock.release()
        raise
    return self

  def __exit__(self, *exception: object) -> None:
    if self._primary:
      self._lock.release()

  def path(self, name: str) -> pathlib.Path:
    """The path of a file or folder of the run.

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

  def write_dataset_info(self, info: Mapping[str, Any]) -> None:
    """Writes `dataset_info.json`, to rebuild the model without the data."""
    if self._primary:
      strict_json.write(self.path(DATASET_INFO), info)

  def write_result(self, result: Mapping[str, Any]) -> None:
    """Writes `result.json`, all of it or nothing."""
    if self._primary:
      strict_json.write(self.path('result.json'), result)

  def _write_config(self) -> None:
    path = self.path('config.json')
    config = strict_json.loads(strict_json.dumps(self._config))
    if path.exists() and has_checkpoints(self.workdir):
      changed = changes(strict_json.loads(path.read_text()), config)
      if changed:
        raise ConfigChangedError(
          f'{self.workdir} has checkpoints of a run with another '
          'configuration:\n  ' + '\n  '.join(changed) + '\nGo on with the '
          f'saved values, use another workdir, or edit {path} to go on with '
          'the new ones deliberately.'
        )
    strict_json.write(path, config)


def has_checkpoints(workdir: str | os.PathLike[str]) -> bool:
  """Whether a run in this directory has saved a step."""
  directory = pathlib.Path(workdir) / CHECKPOINTS
  return directory.is_dir() and any(
    path.name.isdecimal() for path in directory.iterdir()
  )


def changes(
  saved: Mapping[str, Any],
  given: Mapping[str, Any],
  harmless: Collection[str] = HARMLESS,
) -> list[str]:
  """What differs between two configurations, harmless fields aside.

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
  """What ran: packages, Python, operating system, revision of this code.

  No device is touched.
  """
  packages: dict[str, str | None] = {}
  for name in PACKAGES:
    try:
      packages[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      packages[name] = None
  return {
    'python': platform.python_version(),
    'platform': platform.platform(),
    'packages': packages,
    'git': _git(),
  }


def _git() -> dict[str, Any]:
  root = pathlib.Path(__file__).resolve().parents[1]

  def git(*arguments: str) -> str | None:
    try:
      return subprocess.run(
        ('git', '-C', str(root), *arguments),
        capture_output=True,
        check=True,
        text=True,
        timeout=10,
      ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
      return None  # not a checkout, or no git here

  status = git('status', '--porcelain', '--untracked-files=no')
  return {
    'revision': git('rev-parse', 'HEAD'),
    'dirty': None if status is None else bool(status),
  }
