"""Counts bad records by kind, and stops the run when there are too many.

The tolerance is a share of the records of the split, and a record counts once
however often it is read: the verdict then does not depend on the number of
epochs, of threads or of hosts, and one bad record at the very start of a run
does not look like a share of 100 %.
"""

import threading
from typing import Any

from dataset_lib.errors import BadRecord, TooManyBadRecordsError

SHOWN_PER_KIND = 5


class BadRecords:
  """Thread-safe count of distinct bad records.

  Args:
    num_examples: records in the split.
    max_share: tolerated share of bad records; 0 stops at the first one.
  """

  def __init__(self, num_examples: int, max_share: float):
    self._num_examples = num_examples
    self._max_share = max_share
    self._tolerated = int(num_examples * max_share)
    self._rows: set[int] = set()
    self._kinds: dict[str, dict[str, Any]] = {}
    self._lock = threading.Lock()

  def add(self, bad: BadRecord, where: str, row: int) -> None:
    """Counts one bad record.

    Args:
      bad: what is wrong.
      where: file of the record.
      row: index of the record in its source.

    Raises:
      TooManyBadRecordsError: the tolerated share is exceeded.
    """
    with self._lock:
      if row not in self._rows:
        self._rows.add(row)
        kind = self._kinds.setdefault(bad.kind, {'count': 0, 'first': []})
        kind['count'] += 1
        if len(kind['first']) < SHOWN_PER_KIND:
          kind['first'].append(
            {'file': where, 'row': row, 'message': bad.message}
          )
      if len(self._rows) > self._tolerated:
        raise TooManyBadRecordsError(self._complaint())

  def summary(self) -> dict[str, dict[str, Any]]:
    """{kind: {'count': n, 'first': [{'file', 'row', 'message'}, ...]}}."""
    with self._lock:
      return {
        kind: {'count': entry['count'], 'first': list(entry['first'])}
        for kind, entry in self._kinds.items()
      }

  def _complaint(self) -> str:
    lines = [
      f'{len(self._rows)} of {self._num_examples} records are bad, tolerated '
      f'are {self._tolerated} (share {self._max_share}):'
    ]
    for kind, entry in self._kinds.items():
      lines.append(f'  {kind}: {entry["count"]}')
      lines += [
        f'    {first["file"]} (row {first["row"]}): {first["message"]}'
        for first in entry['first']
      ]
    lines.append(
      'Repair or remove these records; for training, dataset.max_bad_share '
      'sets the tolerated share. Evaluation tolerates none.'
    )
    return '\n'.join(lines)
