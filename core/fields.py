"""Legal fields of a configuration, annotated where the fields are declared.

A dataclass or Linen module annotates its fields with types, `Literal`s, the
ranges of `annotated_types`, and a plain string for legal values in words:

  length: Annotated[int, Interval(ge=1, le=65536)]
  split: Annotated[str, Predicate(is_split), "a split such as 'train[:95%]'"]
"""

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import operator
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import BaseMetadata, GroupedMetadata, Predicate
from ml_collections import ConfigDict

from core.errors import ConfigError

ConfigLike = Mapping | ConfigDict  # with string keys
Distinct = Predicate(lambda items: len(set(items)) == len(items))

_WORDS = {
  bool: 'True or False',
  int: 'an integer',
  float: 'a number',
  str: 'a string',
  types.NoneType: 'None',
  Any: 'any value',
  dict: 'a group of fields',
  Mapping: 'a group of fields',
}
_UNIONS = (typing.Union, types.UnionType)
_SIGNS = {'ge': '>=', 'gt': '>', 'le': '<=', 'lt': '<'}
_TESTS = {name: getattr(operator, name) for name in _SIGNS} | {
  'min_length': lambda value, least: len(value) >= least,
  'max_length': lambda value, most: len(value) <= most,
  'func': lambda value, test: test(value),
}


class Unread(str):
  """Text of a command line; `check` reads it as the type of its field."""


def override(
  cls: type, config: ConfigLike, texts: Sequence[str]
) -> dict[str, Any]:
  """Returns a configuration with the defaults of `cls` and 'group.field=text's.

  `check` parses the texts. A field of a group in a tuple is 'groups.0.field'.
  """
  changed = _completed(config, cls)
  for text in texts:
    key, separator, value = text.partition('=')
    if not separator:
      raise ConfigError(f'--config.{key}', 'no value', f'--config.{key}=value')
    *groups, name = key.split('.')
    node, place = changed, ''
    for group in groups:
      legal = _members(node) or {}
      if isinstance(node, dict) and 'name' in node:
        node.setdefault(group, {})  # its class, read later, may have such a one
      if group not in legal:
        kind = 'field' if isinstance(node, dict) else 'item'
        raise ConfigError(place + group, value, unknown(group, legal, kind))
      node, place = legal[group], f'{place}{group}.'
      if _members(node) is None:
        expected = f'{group!r} to be a group of fields, not a value'
        raise ConfigError(f'--config.{key}', value, expected)
    if not isinstance(node, dict):
      expected = f'a field of one of them, such as {place}0.FIELD'
      raise ConfigError(f'--config.{key}', value, expected)
    node[name] = Unread(value)
  return changed


def _completed(value: Any, hint: Any) -> Any:
  """Returns a copy in which all groups are dicts, with their defaults."""
  if isinstance(value, tuple | list):
    item = (*typing.get_args(hint), None)[0]
    return tuple(_completed(element, item) for element in value)
  is_group = dataclasses.is_dataclass(hint)
  if is_group and isinstance(value, typing.cast(type, hint)):
    value = vars(value)
  if not isinstance(value, ConfigLike):
    return value
  kinds = hints(hint) if is_group else {}
  complete = (vars(hint()) if is_group else {}) | dict(value.items())
  return {k: _completed(x, kinds.get(k)) for k, x in complete.items()}


def _members(node: Any) -> dict[str, Any] | None:
  """Returns the fields of a group, or a tuple of groups by their places."""
  if isinstance(node, tuple) and all(isinstance(item, dict) for item in node):
    return {str(place): item for place, item in enumerate(node)}
  return node if isinstance(node, dict) else None


def flat(values: Any, place: str = '') -> Iterator[tuple[str, Any]]:
  """Yields ('group.field', value) of groups as `override` returns them."""
  if not (members := _members(values)):
    yield place, values
  for name, value in (members or {}).items():
    yield from flat(value, f'{place}.{name}' if place else name)


def flag(
  words: str,
  default: Any = dataclasses.MISSING,
  metavar: str | None = None,
  names: str = '',
  many: bool = False,
) -> Any:
  """Declares a flag, typed by its annotation; required without a default.

  `words` and `metavar` appear in --help; `names` replace --field; with `many`
  it may be repeated.
  """
  about = {'words': words, 'metavar': metavar, 'names': names, 'many': many}
  return dataclasses.field(default=default, metadata=about)


def check(
  cls: Any, given: Any, prefix: str, without: Sequence[str] = ()
) -> dict[str, Any]:
  """Returns the fields of `cls`, completed with their defaults.

  Lists become tuples, nested dataclasses dicts. Defaults are not checked.
  Raises ConfigError if `prefix.field` is unknown, in `without`, missing or
  illegal.
  """
  if not isinstance(given, ConfigLike):
    raise ConfigError(prefix, given, describe(dict))
  # Linen gives every module these fields.
  if any(base.__module__.startswith('flax.linen') for base in cls.__mro__):
    without = (*without, 'parent', 'name')
  legal = {
    field.name: field
    for field in dataclasses.fields(cls)
    if field.init and field.name not in without
  }
  path = f'{prefix}.' if prefix else ''
  values = dict(given.items())
  for name in values:
    if name not in legal:
      near = [
        f'{group}.{name}' for group in legal
        if dataclasses.is_dataclass(kind := hints(cls)[group])
        and name in {part.name for part in dataclasses.fields(kind)}
      ]  # fmt: skip
      expected = unknown(name, legal, near=near)
      raise ConfigError(path + name, values[name], expected)
  complete = {}
  for name, field in legal.items():
    hint, value = hints(cls)[name], field.default
    if field.default_factory is not dataclasses.MISSING:
      value = field.default_factory()
    if name in values or dataclasses.is_dataclass(hint):
      default = value if is_open(hint) else {}
      value = check_value(path + name, values.get(name, default), hint)
    if value is dataclasses.MISSING:
      raise ConfigError(path + name, 'nothing', describe(hint))
    complete[name] = value
  return complete


def check_value(field: str, value: Any, hint: Any) -> Any:
  """Returns the value, lists as tuples; ConfigError if it is illegal."""
  if isinstance(value, Unread):
    readings = list(_readings(str(value)))
    accepted = (item for item in readings if accepts(hint, item))
    value = next(accepted, readings[0])
  if is_open(hint):
    from core import registry  # imports this module

    return registry.check_named(value, field, hint)
  if dataclasses.is_dataclass(hint):
    return check(hint, value, field)
  if not accepts(hint, value):
    raise ConfigError(field, value, describe(hint))
  items = typing.get_args(hint)
  if typing.get_origin(hint) is tuple and dataclasses.is_dataclass(items[0]):
    places = enumerate(value)
    return tuple(check_value(f'{field}.{n}', v, items[0]) for n, v in places)
  if typing.get_origin(hint) is dict:
    return {
      k: check_value(f'{field}.{k}', v, items[1]) for k, v in value.items()
    }
  if isinstance(value, ConfigLike):
    return dict(value.items())
  kind = items[0] if typing.get_origin(hint) is Annotated else hint
  if kind is float and isinstance(value, numbers.Integral):
    return float(value)
  return tuple(value) if isinstance(value, list) else value


@functools.cache
def hints(cls: Any) -> dict[str, Any]:
  """Returns the annotations of the fields of a class."""
  return typing.get_type_hints(cls, include_extras=True)


def is_open(hint: Any) -> bool:
  """Whether a field takes any subclass, which a configuration names."""
  return dataclasses.is_dataclass(hint) and inspect.isabstract(hint)


def _readings(text: str) -> Iterator[Any]:
  """Yields the possible meanings of a command line's text, best first."""
  # Thousands of signs or brackets end the parser in other ways.
  with contextlib.suppress(
    ValueError, SyntaxError, RecursionError, MemoryError
  ):
    value = ast.literal_eval(text)
    yield value
    if isinstance(value, float) and value.is_integer():
      yield int(value)
    yield (value,)
  if text.lower() in ('true', 'false', '1', '0'):
    yield text.lower() in ('true', '1')
  yield text
  yield tuple(filter(None, text.split(',')))


def accepts(hint: Any, value: Any) -> bool:
  """Whether a value is legal for an annotation."""
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if origin is Annotated:
    return accepts(arguments[0], value) and all(
      _TESTS[name](value, bound) for name, bound in _limits(arguments[1:])
    )
  if origin is Literal:
    return any(type(value) is type(a) and value == a for a in arguments)
  if origin in _UNIONS:
    return any(accepts(argument, value) for argument in arguments)
  if origin in (tuple, Sequence):
    if not isinstance(value, (tuple, list)):
      return False
    if origin is Sequence or arguments[-1] is ...:
      arguments = arguments[:1] * len(value)
    return len(value) == len(arguments) and all(map(accepts, arguments, value))
  kind = origin or hint
  if kind in (int, float):
    kind = numbers.Integral if kind is int else numbers.Real
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    # A longer integer fits into no array.
    is_short = not isinstance(value, int) or -(2**63) <= value < 2**63
    return is_number and is_short and math.isfinite(value)
  if kind in (dict, Mapping) or dataclasses.is_dataclass(kind):
    return isinstance(value, ConfigLike)
  has_nul = isinstance(value, str) and '\0' in value  # no path may have one
  return kind is Any or (isinstance(value, kind) and not has_nul)


def describe(hint: Any) -> str:
  """Returns the legal values in words: 'an integer in [1, 5]'."""
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if origin is Annotated:
    kind, *limits = arguments
    texts = [item for item in limits if isinstance(item, str)]
    return texts[0] if texts else describe(kind) + _range(dict(_limits(limits)))
  if origin is Literal:
    return 'one of ' + ', '.join(str(item) or "''" for item in arguments)
  if origin in _UNIONS:
    kinds = [a for a in arguments if a is not int or float not in arguments]
    return ' or '.join(map(describe, kinds))
  if origin in (tuple, Sequence):
    is_open = origin is Sequence or arguments[-1] is ...
    size = '' if is_open else f' of {len(arguments)}'
    return f'a tuple{size}, each {describe(arguments[0])}'
  kind = dict if dataclasses.is_dataclass(hint) else origin or hint
  return _WORDS.get(kind) or kind.__name__


def _limits(metadata: Iterable[Any]) -> Iterator[tuple[str, Any]]:
  """Yields name and bound of each constraint: ('ge', 1)."""
  for item in metadata:
    for part in item if isinstance(item, GroupedMetadata) else [item]:
      if dataclasses.is_dataclass(part) and isinstance(part, BaseMetadata):
        yield from dataclasses.asdict(part).items()


def _range(bound: Mapping[str, Any]) -> str:
  signs = [key for key in _SIGNS if key in bound]
  if len(signs) == 2:
    start, end = '[' if 'ge' in bound else '(', ']' if 'le' in bound else ')'
    return f' in {start}{bound[signs[0]]}, {bound[signs[1]]}{end}'
  if signs:
    return f' {_SIGNS[signs[0]]} {bound[signs[0]]}'
  if 'max_length' in bound:
    return f', at most {bound["max_length"]} of them'
  if bound.get('func') is Distinct.func:
    return ', all distinct'
  return ', not empty' if bound.get('min_length') else ''


def unknown(
  name: Any, legal: Iterable[str], kind: str = 'field', near: Any = ()
) -> str:
  """Returns the 'expected ...' part of the message about an illegal name."""
  names = list(legal)
  close = near or difflib.get_close_matches(str(name), names, n=1)
  hint = f' (did you mean {close[0]!r}?)' if close else ''
  return f'no such {kind}{hint}; legal {kind}s are {", ".join(names)}'


@contextlib.contextmanager
def errors_under(prefix: str) -> Iterator[None]:
  """Prefixes the field of a ConfigError."""
  try:
    yield
  except ConfigError as error:
    field = f'{prefix}.{error.field}'
    raise ConfigError(field, error.given, error.expected) from error
