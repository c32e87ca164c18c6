"""Counts of bad records, and the end of a run that has too many."""

import copy
import threading
from collections.abc import Iterable
from typing import Any

from core.errors import BadRecord, UserError


class TooManyBadRecordsError(UserError, RuntimeError):
  """More bad records than the configuration tolerates."""

  exit_code = 4

  @property
  def lines(self) -> list[str]:
    """Lines of the message, for a command."""
    return str(self).splitlines()


class FaultCounts:
  """Counts of faults by kind, and places of the first few; thread-safe."""

  SHOWN = 5

  def __init__(self) -> None:
    self._kinds: dict[str, dict[str, Any]] = {}
    self._lock = threading.RLock()

  def add(self, kind: str, **place: Any) -> None:
    """Counts one fault; `place`: keywords such as file, row, message."""
    with self._lock:
      entry = self._kinds.setdefault(kind, {'count': 0, 'first': []})
      entry['count'] += 1
      if len(entry['first']) < self.SHOWN:
        entry['first'].append(place)

  def summary(self) -> dict[str, dict[str, Any]]:
    """Returns {kind: {'count', 'first': [place]}}, kinds sorted."""
    with self._lock:
      return copy.deepcopy(dict(sorted(self._kinds.items())))


class BadRecords(FaultCounts):
  """Counts distinct bad records of a split, of which a share is tolerated."""

  LISTED = 20
  FEW = 0.1  # a share, above which the file is damaged, not its records

  def __init__(self, num_examples: int, max_share: float, split: str):
    super().__init__()
    self._num_examples, self._max_share = num_examples, max_share
    self._split = split
    self._rows: set[int] = set()
    self._first: list[str] = []
    self._file = ''  # of the last of these

  def count(self, bad_rows: Iterable[tuple[int, BadRecord]]) -> None:
    """Counts rows and their errors; then may raise TooManyBadRecordsError."""
    size = self._num_examples
    tolerated = min(int(size * self._max_share), size - 1)
    with self._lock:
      for row, bad in bad_rows:
        if row not in self._rows:  # not read again, as in a later epoch
          self._rows.add(row)
          self.add(bad.kind, file=bad.where, row=row, message=bad.message)
          if len(self._first) < self.LISTED:
            file, _, place = bad.where.rpartition(', ')
            shown = place if file and file == self._file else bad.where
            self._first.append(f'  {shown}: {bad.message}')
            self._file = file
      if len(self._rows) <= tolerated:
        return
    kinds = ', '.join(f'{k}: {v["count"]}' for k, v in self.summary().items())
    advice = 'Repair or remove these records.'
    if len(self._rows) <= size * self.FEW:
      advice += ' For training, dataset.max_bad_share sets the tolerated share.'
      advice += ' Evaluation tolerates none.'
    raise TooManyBadRecordsError(
      '\n'.join((
        f'{self._split}: {len(self._rows)} of {size} records are bad, '
        f'tolerated are {tolerated} (share {self._max_share}); the first '
        f'{len(self._first)}:', *self._first, f'By kind: {kinds}.', advice,
      ))
    )  # fmt: skip
