"""Sizes of a model: those of a variant, overridden by explicit ones."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Sizes = TypeVar('Sizes')


def look_up(
  variants: Mapping[str, Mapping[str, Any]], name: str
) -> dict[str, Any]:
  """The fields of a variant.

  Raises:
    ValueError: if there is none of this name.
  """
  if name not in variants:
    raise ValueError(
      f'variant: expected one of {tuple(variants)}, got {name!r}'
    )
  return dict(variants[name])


def sizes_of_variant(
  kind: type[Sizes],
  decode: Callable[[str], Mapping[str, Any]],
  variant: str,
  explicit: Mapping[str, int],
  example: str,
) -> Sizes:
  """Sizes of a variant, overridden by the explicit ones that are not 0.

  Args:
    kind: the dataclass of the sizes.
    decode: gives the sizes of a variant, perhaps with other fields.
    variant: its name; '' if every size is explicit.
    explicit: sizes by name; 0 means as in the variant.
    example: a variant that has all sizes, for the message.

  Raises:
    ValueError: if a size is given by neither, or is negative.
  """
  known = dict(decode(variant)) if variant else {}
  known |= {name: size for name, size in explicit.items() if size}
  names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
  for name in names:
    if known.get(name, 0) < 1:
      raise ValueError(
        f'{name}: expected a positive number, or a variant that has it such '
        f'as {example!r}; got {known.get(name, 0)} and variant {variant!r}'
      )
  return kind(**{name: known[name] for name in names})
