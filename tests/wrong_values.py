"""Values outside of the annotated type of a field, for the tests of fields."""

import dataclasses
import types
import typing

from core import fields

# By type; None is wrong unless the type allows it.
OF_OTHER_TYPES = {
  int: ('x', 1.5), float: ('x',), str: (3,), bool: ('x', 3), tuple: (3, 'x')
}  # fmt: skip


def outside(hint):
  """Yields values that a field of this type refuses."""
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if origin in (typing.Union, types.UnionType):
    known = [kind for kind in arguments if kind is not type(None)]
    # What is wrong for a member may be legal for another.
    inner = outside(known[0]) if len(known) == 1 else ()
    yield from (value for value in inner if value is not None)
  elif origin is typing.Annotated:
    base, *limits = arguments
    yield from outside(base)
    for limit in limits:
      for name, distance in (('ge', -1), ('le', 1), ('gt', 0), ('lt', 0)):
        if (end := getattr(limit, name, None)) is not None:
          yield end + distance
      if getattr(limit, 'min_length', 0):
        yield (typing.get_origin(base) or base)()
  elif origin is typing.Literal:
    yield from ('no such value', None)
  else:
    yield from OF_OTHER_TYPES.get(origin or hint, ('x',))
    yield from () if hint is type(None) else (None,)


def wrong_fields(kind, without=()):
  """Yields (field, value) of a dataclass, each value outside of its type."""
  for field in dataclasses.fields(kind):
    if field.init and field.name not in without:
      for value in outside(fields.hints(kind)[field.name]):
        yield field.name, value
