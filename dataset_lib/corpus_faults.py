"""Counts what a corpus has that is not good text, and what was done about it.

Every kind is counted, and the first few of each are named; of files that were
left out or could not be read to their end, all. Nothing is repaired or left out
silently.
"""

from typing import Any

SHOWN_PER_KIND = 5

# What is done about each kind of fault.
ACTIONS = {
  'broken_bytes': 'what is no UTF-8 became U+FFFD; counted once a line',
  'nul_bytes': 'removed',
  'byte_order_mark': 'removed',
  'long_line': 'cut at spaces',
  'one_sentence_document': 'kept: its rows are cut at a word instead',
  'too_short': 'left out: less than two tokens cannot be two segments',
  'empty_file': 'left out',
  'not_utf8_file': 'left out',
  'truncated_gzip': 'read as far as it goes',
  'damaged_gzip': 'read as far as it goes',
  'unreadable_file': 'left out from there on',
  'unreadable_record': 'left out',
  'repeated_file': 'read once',
  'other_file': 'left out: neither .txt nor .txt.gz',
  'linked_folder': 'left out: links to folders are not followed',
}

# Those of whole files, folders and records.
OF_FILES = (
  'empty_file',
  'not_utf8_file',
  'truncated_gzip',
  'damaged_gzip',
  'unreadable_file',
  'unreadable_record',
  'repeated_file',
  'other_file',
  'linked_folder',
)


class Faults:
  """Counts by kind; not thread-safe.

  Attributes:
    files: {'kind', 'where', 'message'} of every fault of a whole file.
  """

  def __init__(self) -> None:
    self.files: list[dict[str, str]] = []
    self._kinds: dict[str, dict[str, Any]] = {}

  def add(self, kind: str, where: str, message: str = '') -> None:
    """Counts one fault.

    Args:
      kind: one of `ACTIONS`.
      where: the file, and the line or byte in it.
      message: what was found there.
    """
    entry = self._kinds.setdefault(
      kind, {'count': 0, 'action': ACTIONS[kind], 'first': []}
    )
    entry['count'] += 1
    place = {'where': where, 'message': message}
    if len(entry['first']) < SHOWN_PER_KIND:
      entry['first'].append(place)
    if kind in OF_FILES:
      self.files.append({'kind': kind} | place)

  def summary(self) -> dict[str, dict[str, Any]]:
    """{kind: {'count', 'action', 'first': [{'where', 'message'}]}}, sorted."""
    return {kind: self._kinds[kind] for kind in sorted(self._kinds)}
