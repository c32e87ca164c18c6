"""Classes by name, 'package.module:Class', and whose code may be imported.

A configuration may come from others. So only packages of this project are
imported, and those that the user has named (`trust`), and never from the folder
of a run (`keep_out`).
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import pathlib
import re
import sys
from collections.abc import Iterable
from typing import Any

from core import fields
from core.errors import ConfigError
from core.fields import ConfigLike
from core.files import Path

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_NAME = re.compile(r'(?:[\w.]+=)?((\w+)(?:\.\w+)*:\w+)')  # also of KEY=NAME
_EXPECTED = "'package.module:Name' of a class that can be imported"
_trusted: set[str] = set()  # packages
_folders: set[pathlib.Path] = set()


def trust(*packages: str) -> None:
  """Allows names of classes of a package that the user names."""
  _trusted.update(packages)


def trust_named(given: Any) -> None:
  """Trusts the packages of all names in a configuration of the user."""
  if isinstance(given, ConfigLike):
    trust_named(list(given.values()))
  elif isinstance(given, str) and (match := _NAME.fullmatch(given)):
    trust(match[2])
  elif isinstance(given, list | tuple):
    for item in given:
      trust_named(item)


def keep_out(folder: Path) -> None:
  """Imports nothing from a folder from now on, unless it holds this code."""
  inside = pathlib.Path(folder).resolve()
  if not _ROOT.is_relative_to(inside):
    _folders.add(inside)
    sys.path[:] = [
      path
      for path in sys.path
      if not pathlib.Path(path).resolve().is_relative_to(inside)
    ]


def locate(
  name: Any, field: str, base: type = object, expected: str = _EXPECTED
) -> Any:
  """Returns the class `name`, a subclass of `base` that is not abstract.

  Raises ConfigError, before any import if the package is not trusted.
  """
  match = _NAME.fullmatch(name) if isinstance(name, str) else None
  if not match or match[1] != name:
    raise ConfigError(field, name, expected)
  package, (module, _, attribute) = match[2], name.partition(':')
  if package not in _trusted | _own_packages():
    legal = f'{expected}, of this project or of a package that you trust: '
    here = f"--trust={package} (in Python: core.registry.trust('{package}'))"
    raise ConfigError(field, name, legal + here)
  try:
    _check_places(module, package)
    target = getattr(importlib.import_module(module), attribute)
  except (ImportError, AttributeError, ValueError) as error:
    raise ConfigError(field, name, f'{expected} ({error})') from error
  if not (inspect.isclass(target) and issubclass(target, base)):
    raise ConfigError(field, name, expected)
  if inspect.isabstract(target):
    abstract: Any = target
    missing = ', '.join(sorted(abstract.__abstractmethods__))
    raise ConfigError(field, name, f'{expected}, which defines {missing}')
  return target


def build(cls: type, values: Any, **others: Any) -> Any:
  """Returns an object with checked fields; builds those that name a class."""
  hints = fields.hints(cls)
  made = {
    name: named(value, name, hints[name])
    if fields.is_open(hints[name])
    else value
    for name, value in dict(values).items()
  }
  return cls(**made, **others)


def named(values: Any, field: str, base: type) -> Any:
  """Returns the object that `described` describes, or raises ConfigError."""
  if isinstance(values, base):
    return values
  kind, settings = _named(values, field, base)
  return build(kind, fields.check(kind, settings, field))


def check_named(values: Any, field: str, base: type) -> dict[str, Any]:
  """Returns 'name' and all fields of the dataclass that the values name."""
  if isinstance(values, base):
    return described(values)
  kind, settings = _named(values, field, base)
  return {'name': str(values['name']), **fields.check(kind, settings, field)}


def _named(values: Any, field: str, base: type) -> tuple[type, dict[str, Any]]:
  """Returns the class that values name, a subclass of `base`, and the rest."""
  if not isinstance(values, ConfigLike):
    example = f"dict(name='module:Class', ...) of a {base.__name__}"
    raise ConfigError(field, values, example)
  settings = dict(values.items())
  name = str(settings.pop('name', ''))
  expected = f"'package.module:Class' of a {base.__name__}"
  return locate(name, f'{field}.name', base, expected), settings


def described(value: Any) -> dict[str, Any]:
  """Returns the name of an object's class and its fields, for JSON."""
  return {'name': name_of(type(value)), **dataclasses.asdict(value)}


def name_of(kind: type) -> str:
  """Returns the name by which `locate` gives a class."""
  return f'{kind.__module__}:{kind.__qualname__}'


def _check_places(module: str, package: str) -> None:
  """Raises ImportError if a module, or a package around it, is foreign."""
  directory = _ROOT / package
  is_own = package in _own_packages()
  parts = module.split('.')
  for end in range(1, len(parts) + 1):
    spec = importlib.util.find_spec('.'.join(parts[:end]))
    for place in _places(spec):
      if is_own and not place.is_relative_to(directory):
        raise ImportError(f'{place} has the name of a package of this project')
      for folder in _folders:
        is_around = is_own and folder.is_relative_to(directory)
        if is_around or place.is_relative_to(folder):
          raise ImportError(f'{place} is in, or around, the folder of a run')


def _places(spec: Any) -> Iterable[pathlib.Path]:
  if spec is not None:
    files = [spec.origin] if spec.has_location else []
    places = [*(spec.submodule_search_locations or ()), *files]
    yield from (pathlib.Path(place).resolve() for place in places)


@functools.cache
def _own_packages() -> frozenset[str]:
  """Names the libraries and families, in a checkout by its folders."""
  if (_ROOT / 'launch' / 'command_line.py').is_file():
    packages = {path.parent.name for path in _ROOT.glob('*/__init__.py')}
  else:
    installed = importlib.metadata.distribution('adaptive-computation')
    packages = {*(installed.read_text('top_level.txt') or '').split()}
  return frozenset(packages - {'benchmarks', 'configs', 'launch', 'tests'})
