"""The error of a model's field."""

from typing import Any


class FieldError(ValueError):
  """A field with an illegal value; `expected` is the range in words."""

  def __init__(self, field: str, given: Any, expected: str) -> None:
    try:
      shown = f'{given!r:.1000}'
    except ValueError:  # an integer of thousands of digits
      shown = f'a {type(given).__name__} that is too long to show'
    super().__init__(f'{field}: expected {expected}, got {shown}')
    self.field = field
    self.given = given
    self.expected = expected

  def __reduce__(self) -> tuple[Any, ...]:
    return type(self), (self.field, self.given, self.expected)


def check_option(field: str, given: Any, legal: tuple[Any, ...]) -> None:
  """Raises FieldError if a value is not one of the legal ones."""
  if given not in legal:
    raise FieldError(field, given, f'one of {legal}')
