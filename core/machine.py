"""Processors and memory of this process: affinity, cgroup limits, a flag."""

import contextlib
import glob
import importlib.metadata
import importlib.util
import math
import os
import pathlib
from collections.abc import Iterator

CGROUPS = pathlib.Path('/sys/fs/cgroup')
MEMBERSHIP = pathlib.Path('/proc/self/cgroup')
# By XLA's CPU client and by the tokenizers.
_VARIABLES = 'PJRT_NPROC', 'RAYON_NUM_THREADS'
# Of Cloud TPU VMs: up to v4, and from v5e on.
TPU_FILES = '/dev/accel*', '/dev/vfio/[0-9]*'
_chosen: list[int] = []  # by `use_threads`


def cores() -> int:
  """Returns the processors that this process may use, at least 1.

  A quota of CPU time counts as whole processors: with more threads all would be
  stopped when it is used up.
  """
  if _chosen:
    return _chosen[0]
  files = ('cpu.max',), ('cpu.cfs_quota_us', 'cpu.cfs_period_us')
  quotas = [math.ceil(a / b) for a, b in _limits('cpu', *files)]
  return max(1, min([_available(), *quotas]))


def memory() -> int:
  """Returns the bytes of memory that this process may use; 0 if not known."""
  try:
    size = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  except (AttributeError, ValueError):  # not on every system
    return 0
  files = ('memory.max',), ('memory.limit_in_bytes',)
  return min([size, *(limit for (limit,) in _limits('memory', *files))])


def use_threads(count: int) -> None:
  """Sets what `cores` returns (0: nothing), before JAX creates its devices."""
  _chosen[:] = [count] if count else []
  if cores() != _available():
    for name in _VARIABLES:
      os.environ.setdefault(name, str(cores()))


def affinity() -> list[int]:
  """Returns the cores that this process may run on, [] if it is not known."""
  try:
    return sorted(os.sched_getaffinity(0))
  except AttributeError:  # not on every system
    return []


def has_only_cpu() -> bool:
  """Tells without starting JAX's backend, whose threads would be too early."""
  if platforms := os.environ.get('JAX_PLATFORMS'):
    return platforms == 'cpu'
  if importlib.metadata.entry_points(group='jax_plugins'):
    return False
  has_libtpu = importlib.util.find_spec('libtpu') is not None
  return not (has_libtpu and any(map(glob.glob, TPU_FILES)))


def skip_absent_tpu() -> None:
  """Lets JAX use the CPU if libtpu is installed where there is no TPU.

  It would try libtpu first, which prints errors. Call it before importing JAX.
  """
  if importlib.util.find_spec('libtpu') is not None and has_only_cpu():
    os.environ['JAX_PLATFORMS'] = 'cpu'


def _available() -> int:
  return len(affinity()) or os.cpu_count() or 1


def _folders(controller: str) -> Iterator[pathlib.Path]:
  """Yields the folders of the cgroups that the process is in, v1 or v2."""
  with contextlib.suppress(OSError):
    for line in MEMBERSHIP.read_text().splitlines():
      _, controllers, path = line.split(':', 2)
      if controllers and controller not in controllers.split(','):
        continue
      # In a container the path may be that of the host; its root is ours.
      root = CGROUPS / controller if controllers else CGROUPS
      folder = root / path.lstrip('/')
      for place in (folder, *folder.parents):
        if place.is_relative_to(root):
          yield place


def _limits(
  controller: str, *files: tuple[str, ...]
) -> Iterator[tuple[int, ...]]:
  """Yields the positive numbers of each of `files` that a cgroup has."""
  for folder in _folders(controller):
    for names in files:
      with contextlib.suppress(OSError, ValueError):  # 'max': no limit
        text = ' '.join((folder / name).read_text() for name in names)
        numbers = tuple(map(int, text.split()))
        if min(numbers) > 0:
          yield numbers
