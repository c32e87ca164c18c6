"""The packages of a checkout, found and not listed.

A library is `core`, `halting` or `*_lib`; `benchmarks`, `configs`, `launch` and
`tests` have their roles; every other top-level package is a family of
models.
"""

import importlib
import inspect
import pathlib

ROLES = ('benchmarks', 'configs', 'launch', 'tests')
LIBRARIES = ('core', 'halting')  # without the suffix of the others


def packages(root: pathlib.Path) -> tuple[str, ...]:
  return tuple(sorted(path.parent.name for path in root.glob('*/__init__.py')))


def libraries(root: pathlib.Path) -> tuple[str, ...]:
  names = packages(root)
  return tuple(n for n in names if n.endswith('_lib') or n in LIBRARIES)


def families(root: pathlib.Path) -> tuple[str, ...]:
  others = (*libraries(root), *ROLES)
  return tuple(name for name in packages(root) if name not in others)


def config_files(root: pathlib.Path) -> tuple[str, ...]:
  """Paths of the configuration files, those that define `get_config`."""
  return tuple(
    str(path.relative_to(root))
    for path in sorted((root / 'configs').rglob('*.py'))
    if 'def get_config(' in path.read_text()
  )


def tasks(root: pathlib.Path) -> dict[str, type]:
  """Every subclass of `Task` that a package defines, by 'module:Class'."""
  from train_lib.task import Task

  found = {}
  for name in (*families(root), 'train_lib'):
    for path in sorted((root / name).rglob('*.py')):
      parts = path.relative_to(root).with_suffix('').parts
      module = importlib.import_module('.'.join(parts))
      for label, kind in inspect.getmembers(module, inspect.isclass):
        own = kind.__module__ == module.__name__ and issubclass(kind, Task)
        if own and not inspect.isabstract(kind):
          found[f'{module.__name__}:{label}'] = kind
  return found
