"""Legal fields of a configuration, declared where the fields are.

A dataclass or Linen module annotates its fields with types, `Literal`s and the
ranges of `annotated_types`; `check` compares a mapping with them:

  @dataclasses.dataclass(frozen=True)
  class Source:
    length: Annotated[int, Interval(ge=1, le=65536)]
    split: Annotated[str, Predicate(is_split), "a split such as 'train[:95%]'"]
    kind: Literal['leading', 'scattered'] = 'leading'
    layers: Annotated[tuple[Annotated[int, Ge(1)], ...], Distinct] = ()

  fields.check(Source, {'length': 16}, 'dataset')

A plain string in an annotation describes the legal values in words.
"""

import contextlib
import dataclasses
import difflib
import importlib
import math
import numbers
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import annotated_types

from dataset_lib.errors import ConfigError

_SIGNS = {'ge': '>=', 'gt': '>', 'le': '<=', 'lt': '<'}
Distinct = annotated_types.Predicate(
  lambda items: len(set(items)) == len(items)
)


@runtime_checkable
class ConfigLike(Protocol):
  """A mapping with string keys, or an ml_collections ConfigDict."""

  def items(self) -> Iterable[tuple[str, Any]]:
    """Returns pairs of field name and value."""


def check(
  cls: type, given: Any, prefix: str, without: Sequence[str] = ()
) -> dict[str, Any]:
  """Returns the fields of `cls` as given, completed with their defaults.

  Lists become tuples, nested dataclasses dicts. Defaults are not checked.

  Args:
    cls: a dataclass or a Linen module.
    given: field names and values, a mapping or a ConfigDict.
    prefix: dotted path before the field names in messages, like 'dataset'.
    without: fields that a configuration cannot set.

  Raises:
    ConfigError: a field is unknown, missing or has an illegal value.
  """
  if not isinstance(given, ConfigLike):
    raise ConfigError(prefix, given, 'a group of fields')
  # Linen gives every module the fields `parent` and `name`.
  without = (*without, *(('parent', 'name') if hasattr(cls, 'apply') else ()))
  legal = {
    field.name: field
    for field in dataclasses.fields(cls)
    if field.init and field.name not in without
  }
  path = f'{prefix}.' if prefix else ''
  values = dict(given.items())
  for name in values:
    if name not in legal:
      raise ConfigError(f'{path}{name}', values[name], _suggest(name, legal))
  hints = typing.get_type_hints(cls, include_extras=True)
  return {
    name: check_value(f'{path}{name}', values[name], hints[name])
    if name in values
    else _default(f'{path}{name}', field, hints[name])
    for name, field in legal.items()
  }


def check_value(field: str, value: Any, hint: Any) -> Any:
  """Returns a value checked against an annotation, lists as tuples.

  Raises:
    ConfigError: the value is not legal.
  """
  if dataclasses.is_dataclass(hint):
    return check(typing.cast(type, hint), value, field)
  legal = legal_values(hint)
  if not legal.accepts(value):
    raise ConfigError(field, value, legal.words)
  kind = (typing.get_args(hint) or (None,))[-1]
  if typing.get_origin(hint) is dict and dataclasses.is_dataclass(kind):
    return {k: check_value(f'{field}.{k}', v, kind) for k, v in value.items()}
  if isinstance(value, ConfigLike):
    return dict(value.items())
  if legal.is_float and isinstance(value, numbers.Integral):
    return float(value)
  return tuple(value) if isinstance(value, list) else value


def _default(name: str, field: dataclasses.Field, hint: Any) -> Any:
  if field.default is not dataclasses.MISSING:
    value = field.default
  elif field.default_factory is not dataclasses.MISSING:
    value = field.default_factory()
  else:
    raise ConfigError(name, 'nothing', legal_values(hint).words)
  return dataclasses.asdict(value) if dataclasses.is_dataclass(hint) else value


@contextlib.contextmanager
def errors_under(prefix: str) -> Iterator[None]:
  """Puts a prefix before the field of an error, also of those of model_lib.

  Raises:
    ConfigError: a ValueError with `field`, `given` and `expected` was raised.
  """
  try:
    yield
  except ValueError as error:
    parts = [getattr(error, name, None) for name in ('field', 'given')]
    expected = getattr(error, 'expected', None)
    if expected is None:
      raise
    raise ConfigError(f'{prefix}.{parts[0]}', parts[1], expected) from error


class Legal(NamedTuple):
  """Legal values of an annotation.

  Attributes:
    words: description, 'an integer in [1, 5]'.
    plural: description of several, 'integers in [1, 5]'.
    accepts: returns True for a legal value.
    is_float: whether an integer is to become a float.
  """

  words: str
  plural: str
  accepts: Callable[[Any], bool]
  is_float: bool = False


def _is_number(value: Any) -> bool:
  is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
  return is_real and math.isfinite(value)


_GROUP = Legal(
  'a group of fields', 'groups', lambda value: isinstance(value, ConfigLike)
)
_KINDS: dict[Any, Legal] = {
  bool: Legal(
    'True or False', 'booleans', lambda value: isinstance(value, bool)
  ),
  int: Legal(
    'an integer',
    'integers',
    lambda value: _is_number(value) and isinstance(value, numbers.Integral),
  ),
  float: Legal('a number', 'numbers', _is_number, is_float=True),
  str: Legal('a string', 'strings', lambda value: isinstance(value, str)),
  types.NoneType: Legal('None', 'None', lambda value: value is None),
  Any: Legal('any value', 'any values', lambda value: True),
  dict: _GROUP,
  Mapping: _GROUP,
}


def legal_values(hint: Any) -> Legal:
  """Returns the legal values of a type or an annotation."""
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if origin is typing.Annotated:
    return _narrowed(legal_values(arguments[0]), arguments[1:])
  if origin is typing.Literal:
    listed = ', '.join(str(item) or "''" for item in arguments)
    return Legal(
      f'one of {listed}',
      f'names out of {listed}',
      lambda value: any(
        type(value) is type(item) and value == item for item in arguments
      ),
    )
  if origin in (typing.Union, types.UnionType):
    kinds = [
      legal_values(item)
      for item in arguments
      if not (item is int and float in arguments)
    ]
    return Legal(
      ' or '.join(kind.words for kind in kinds),
      ' or '.join(kind.plural for kind in kinds),
      lambda value: any(kind.accepts(value) for kind in kinds),
    )
  if origin in (tuple, Sequence):
    return _tuple(arguments)
  kind = origin or hint
  return _KINDS.get(kind) or Legal(
    kind.__name__, kind.__name__, lambda value: isinstance(value, kind)
  )


def _tuple(arguments: tuple[Any, ...]) -> Legal:
  """Legal values of `Sequence[A]`, `tuple[A, ...]` or `tuple[A, A]`."""
  kind = legal_values(arguments[0])
  is_fixed = len(arguments) == 2 and arguments[1] is not ...
  length = 'two ' if is_fixed else ''
  return Legal(
    f'a tuple of {length}{kind.plural}',
    f'tuples of {length}{kind.plural}',
    lambda value: (
      isinstance(value, (tuple, list))
      and (not is_fixed or len(value) == len(arguments))
      and all(map(kind.accepts, value))
    ),
  )


def _narrowed(kind: Legal, constraints: Iterable[Any]) -> Legal:
  """Legal values of an `Annotated` type."""
  limits: list[Any] = []
  for item in constraints:
    is_group = isinstance(item, annotated_types.GroupedMetadata)
    limits += item if is_group else [item]
  described = [item for item in limits if isinstance(item, str)]
  if described:
    words = plural = described[0]
  else:
    words, plural = (text + _range(limits) for text in kind[:2])
    if Distinct in limits:
      words = words.replace('tuple of', 'tuple of distinct')
  return Legal(
    words,
    plural,
    lambda value: (
      kind.accepts(value) and all(_keeps(limit, value) for limit in limits)
    ),
    kind.is_float,
  )


def _range(limits: Iterable[Any]) -> str:
  """Describes bounds: ' in [1, 5]', ' >= 1' or ', not empty'."""
  bound: dict[str, Any] = {}
  for limit in limits:
    if isinstance(limit, annotated_types.BaseMetadata):
      bound |= _bounds(limit)
  found = [(sign, bound[key]) for key, sign in _SIGNS.items() if key in bound]
  if len(found) == 2:
    (low, least), (high, most) = found
    start, end = '[' if low == '>=' else '(', ']' if high == '<=' else ')'
    return f' in {start}{least}, {most}{end}'
  if found:
    return f' {found[0][0]} {found[0][1]}'
  if 'max_length' in bound:
    return f', at most {bound["max_length"]} of them'
  return ', not empty' if bound.get('min_length') else ''


def _bounds(limit: Any) -> dict[str, Any]:
  return dataclasses.asdict(limit)


def _keeps(limit: Any, value: Any) -> bool:
  match limit:
    case annotated_types.Predicate(test):
      return bool(test(value))
    case annotated_types.MinLen(least):
      return len(value) >= least
    case annotated_types.MaxLen(most):
      return len(value) <= most
    case annotated_types.BaseMetadata():
      ((name, bound),) = _bounds(limit).items()
      return bool(getattr(operator, name)(value, bound))
  return True


def _suggest(name: str, legal: Iterable[str]) -> str:
  names = list(legal)
  expected = f'no such field; legal fields are {", ".join(names)}'
  close = difflib.get_close_matches(str(name), names, n=1)
  return expected + (f' (did you mean {close[0]}?)' if close else '')


def locate(name: Any, field: str) -> Any:
  """Returns the object that a configuration names as `'package.module:Name'`.

  Args:
    name: module and name of the object.
    field: the configuration field that holds the name, for the error.

  Raises:
    ConfigError: there is no such module or no such name in it.
  """
  expected = "'package.module:Name' of something that can be imported"
  if not (isinstance(name, str) and re.fullmatch(r'\w+(\.\w+)*:\w+', name)):
    raise ConfigError(field, name, expected)
  module, _, attribute = name.partition(':')
  try:
    return getattr(importlib.import_module(module), attribute)
  except (ImportError, AttributeError) as error:
    raise ConfigError(field, name, f'{expected} ({error})') from error
