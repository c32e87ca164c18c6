"""Legal fields of a configuration: tables that check values and explain.

A part of a configuration (a data set, an evaluator, the optimizer) declares
its legal fields in a table; a wrong name is answered with the nearest one, a
wrong value with the legal range, before anything is read or built.
"""

import dataclasses
import difflib
import importlib
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from dataset_lib.errors import ConfigError


@runtime_checkable
class ConfigLike(Protocol):
  """A mapping with string keys, or an ml_collections ConfigDict."""

  def items(self) -> Iterable[tuple[str, Any]]:
    """Pairs of field name and value."""


@dataclasses.dataclass(frozen=True)
class Field:
  """One legal field of a data set's configuration.

  Attributes:
    expected: the legal range in words, shown when a value is rejected.
    accepts: whether a value is legal.
    default: value when the field is absent; REQUIRED if it must be given.
  """

  expected: str
  accepts: Callable[[Any], bool]
  default: Any


REQUIRED = object()


def integer(low: int, high: int, default: Any = REQUIRED) -> Field:
  """An integer in [low, high]; True and 3.0 are not integers."""

  def accepts(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
      return False
    return low <= int(value) <= high

  return Field(f'an integer in [{low}, {high}]', accepts, default)


def real(low: float, high: float, default: Any = REQUIRED) -> Field:
  """A finite number in [low, high]."""

  def accepts(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
      return False
    return low <= float(value) <= high  # False for NaN

  return Field(f'a number in [{low}, {high}]', accepts, default)


def text(expected: str, default: Any = REQUIRED) -> Field:
  """A string; empty only where '' is the default."""

  def accepts(value: Any) -> bool:
    return isinstance(value, str) and (bool(value) or default == '')

  return Field(expected, accepts, default)


def names(allowed: Iterable[str], default: Any = REQUIRED) -> Field:
  """A tuple of distinct names out of `allowed`."""
  allowed = tuple(allowed)

  def accepts(value: Any) -> bool:
    return (
      isinstance(value, (tuple, list))
      and all(isinstance(name, str) and name in allowed for name in value)
      and len(set(value)) == len(value)
    )

  return Field(
    f'a tuple of distinct names out of {", ".join(allowed)}', accepts, default
  )


def check_field(key: str, value: Any, field: Field) -> None:
  """Raises ConfigError unless `value` is legal for `field`."""
  if not field.accepts(value):
    raise ConfigError(key, value, field.expected)


def check_fields(
  config: ConfigLike, fields: Mapping[str, Field], prefix: str
) -> dict[str, Any]:
  """The configuration completed with defaults.

  Args:
    config: field names and values.
    fields: the legal fields.
    prefix: dotted path before the field names in messages, like 'dataset'.

  Raises:
    ConfigError: a field is unknown, missing or has an illegal value.
  """
  given = dict(config.items())
  for name in given:
    if name not in fields:
      raise ConfigError(f'{prefix}.{name}', given[name], _suggest(name, fields))
  complete = {}
  for name, field in fields.items():
    value = given.get(name, field.default)
    if value is REQUIRED:
      raise ConfigError(f'{prefix}.{name}', 'nothing', field.expected)
    check_field(f'{prefix}.{name}', value, field)
    complete[name] = tuple(value) if isinstance(value, list) else value
  return complete


def _suggest(name: str, fields: Mapping[str, Field]) -> str:
  expected = f'no such field; legal fields are {", ".join(fields)}'
  close = difflib.get_close_matches(str(name), fields, n=1)
  return expected + (f' (did you mean {close[0]}?)' if close else '')


def check_one_of(key: str, value: Any, allowed: Iterable[str]) -> None:
  """Raises ConfigError unless `value` is one of the allowed names."""
  allowed = tuple(allowed)
  if not (isinstance(value, str) and value in allowed):
    raise ConfigError(key, value, f'one of {", ".join(allowed)}')


def locate(name: Any, key: str) -> Any:
  """Finds the object that a configuration names as `'package.module:Name'`.

  Args:
    name: where the object lives.
    key: the configuration key that holds the name, for the error.

  Raises:
    ConfigError: if there is no such module or no such name in it.
  """
  expected = "'package.module:Name' of something that can be imported"
  module, _, attribute = (
    name.partition(':') if isinstance(name, str) else ('',) * 3
  )
  if not module or not attribute:
    raise ConfigError(key, name, expected)
  try:
    return getattr(importlib.import_module(module), attribute)
  except (ImportError, AttributeError) as error:
    raise ConfigError(key, name, f'{expected} ({error})') from error
