"""Errors of the input pipeline: configuration, missing data, bad records."""

import copy
import threading
from typing import Any

MAX_SHOWN, MAX_MESSAGE = 1000, 1400  # characters of a value, of a message


def shortened(message: object, most: int = MAX_MESSAGE) -> str:
  """Returns a message without its middle if it is long."""
  text, half = str(message), most // 2
  return text if len(text) <= most else f'{text[:half]}...{text[-half:]}'


class ConfigError(ValueError):
  """A configuration value that is unknown, of the wrong type or out of range.

  `field` is dotted, as 'dataset.image_size'; `expected` is the legal range in
  words.
  """

  exit_code = 2  # of a command that ends with the error

  def __init__(self, field: str, given: Any, expected: str):
    message = f'{field}: expected {expected}, got {_shown(given)}'
    super().__init__(shortened(message))
    self.field, self.given, self.expected = field, given, expected

  def __reduce__(self) -> tuple[Any, ...]:
    return type(self), (self.field, self.given, self.expected)


def _shown(given: Any) -> str:
  try:
    text = repr(given)
  except (ValueError, RecursionError):  # an integer of thousands of digits
    return f'a {type(given).__name__} that is too long to show'
  return text if len(text) <= MAX_SHOWN else f'{text[:MAX_SHOWN]}...'


class MissingDataError(FileNotFoundError):
  """The data set, or one of its splits, is not where it should be."""

  exit_code = 4

  def __init__(self, message: str):
    super().__init__(shortened(message))


class InvalidDataError(ValueError):
  """The data set as a whole is not usable: its layout, index or class list."""

  exit_code = 4

  def __init__(self, message: str):
    super().__init__(shortened(message))


class WriteError(OSError):
  """A file cannot be written, e.g. because the disk is full."""

  exit_code = 6


class BadRecord(ValueError):  # noqa: N818  one row, not the end of a run
  """One record that cannot be used; the reader counts and replaces it.

  `kind` is the short name that it is counted under, like 'truncated'; `where`
  is its file, or '' if the source's `where(index)` gives it.
  """

  def __init__(self, kind: str, where: str, message: str):
    message = shortened(message)
    super().__init__(f'{kind}: {where}: {message}' if where else message)
    self.kind, self.where, self.message = kind, where, message


class TooManyBadRecordsError(RuntimeError):
  """More bad records than the configuration tolerates."""

  exit_code = 4


class FaultCounts:
  """Counts faults by kind and keeps the places of the first few of each."""

  SHOWN = 5

  def __init__(self) -> None:
    self._kinds: dict[str, dict[str, Any]] = {}

  def add(self, kind: str, **place: Any) -> None:
    """Counts one fault; `place`: keywords such as file, row, message."""
    entry = self._kinds.setdefault(kind, {'count': 0, 'first': []})
    entry['count'] += 1
    if len(entry['first']) < self.SHOWN:
      entry['first'].append(place)

  def summary(self) -> dict[str, dict[str, Any]]:
    """Returns {kind: {'count', 'first': [place]}}, kinds sorted."""
    return copy.deepcopy(dict(sorted(self._kinds.items())))


class BadRecords(FaultCounts):
  """Thread-safe count of distinct bad records by kind.

  The share `max_share` of the split is tolerated. A record counts once, so that
  reading it again, in a later epoch or another thread, does not stop the run.
  """

  def __init__(self, num_examples: int, max_share: float):
    super().__init__()
    self._num_examples, self._max_share = num_examples, max_share
    self._rows: set[int] = set()
    self._lock = threading.Lock()

  def count(self, bad: BadRecord, where: str, row: int) -> None:
    """Counts record `row` of file `where`; raises TooManyBadRecordsError."""
    size = self._num_examples
    tolerated = min(int(size * self._max_share), size - 1)
    with self._lock:
      if row not in self._rows:
        self._rows.add(row)
        self.add(bad.kind, file=where, row=row, message=bad.message)
      if len(self._rows) <= tolerated:
        return
    lines = [
      f'{len(self._rows)} of {size} records are bad, tolerated are {tolerated} '
      f'(share {self._max_share}):'
    ]
    for kind, entry in self.summary().items():
      lines.append(f'  {kind}: {entry["count"]}')
      place = '    {file} (row {row}): {message}'
      lines += [place.format(**first) for first in entry['first']]
    raise TooManyBadRecordsError(
      '\n'.join(lines) + '\nRepair or remove these records; for training, '
      'dataset.max_bad_share sets the tolerated share. Evaluation tolerates '
      'none.'
    )

  def summary(self) -> dict[str, dict[str, Any]]:
    """Returns {kind: {'count', 'first': [{'file', 'row', 'message'}]}}."""
    with self._lock:
      return super().summary()
