"""The errors that a user sees, each with the exit code of a command."""

from collections.abc import Sequence
from typing import Any

MAX_SHOWN, MAX_MESSAGE = 1000, 1400  # characters of a value, of a message


def shortened(message: object, most: int = MAX_MESSAGE) -> str:
  """Returns a message without its middle if it is long."""
  text, half = str(message), most // 2
  return text if len(text) <= most else f'{text[:half]}...{text[-half:]}'


class UserError(Exception):
  """An expected error: a command prints its line and ends with `exit_code`."""

  exit_code = 2
  in_all_processes = False  # of a training, at the same step

  @property
  def lines(self) -> Sequence[str]:
    """Lines that a command prints."""
    return (str(self),)


class ConfigError(UserError, ValueError):
  """A configuration value that is unknown, of the wrong type or out of range.

  `field` is dotted, as 'dataset.image_size'; `expected` are the legal values.
  """

  def __init__(self, field: str, given: Any, expected: str):
    message = f'{field}: expected {expected}, got {_shown(given)}'
    super().__init__(shortened(message))
    self.field, self.given, self.expected = field, given, expected

  def __reduce__(self) -> tuple[Any, ...]:
    return type(self), (self.field, self.given, self.expected)


class Mistakes(UserError, ValueError):  # noqa: N818
  """Several mistakes; a command prints a line for each of `lines`."""

  def __init__(self, lines: Sequence[str]):
    super().__init__('; '.join(map(shortened, lines)))
    self._lines = tuple(map(shortened, lines))

  @property
  def lines(self) -> Sequence[str]:
    """The mistakes."""
    return self._lines

  def __reduce__(self) -> tuple[Any, ...]:
    return type(self), (self._lines,)


def check_option(field: str, given: Any, legal: tuple[Any, ...]) -> None:
  """Raises ConfigError if a value is not one of the legal ones."""
  if given not in legal:
    raise ConfigError(field, given, f'one of {legal}')


def _shown(given: Any) -> str:
  try:
    text = repr(given)
  except (ValueError, RecursionError):  # an integer of thousands of digits
    return f'a {type(given).__name__} that is too long to show'
  return text if len(text) <= MAX_SHOWN else f'{text[:MAX_SHOWN]}...'


class DataError(UserError):
  """A data set, or a file, that cannot be used."""

  exit_code = 4

  def __init__(self, message: str):
    super().__init__(shortened(message))


class MissingDataError(DataError, FileNotFoundError):
  """The data set, or one of its splits, is not where it should be."""


class InvalidDataError(DataError, ValueError):
  """The data set as a whole is not usable: its layout, index or class list."""


class WriteError(UserError, OSError):
  """A file cannot be written, e.g. because the disk is full."""

  exit_code = 6


class BadRecord(ValueError):  # noqa: N818  one row, not the end of a run
  """One record that cannot be used; the reader counts and replaces it.

  It is counted under `kind`, such as 'truncated'; `where` is its file, or '' if
  the source's `where(index)` gives it.
  """

  def __init__(self, kind: str, where: str, message: str):
    message = shortened(message)
    super().__init__(f'{kind}: {where}: {message}' if where else message)
    self.kind, self.where, self.message = kind, where, message
