"""Policy and options of a served AdaTape."""

import dataclasses
from typing import Any

from serve_lib.chain import Row
from serve_lib.decisions import ClassifierPolicy, Setting


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of serving an AdaTape."""

  setting: Setting = 'trained'  # 'guaranteed' is that of the certificate


class TapePolicy(ClassifierPolicy):
  """Rows read a tape, then are encoded with it; every row runs both stages."""

  FIELDS = {'exit_reason': 'string', 'tape_length': 'integer'}

  def describe(self, row: Row) -> tuple[int, float, dict[str, Any]]:
    """Returns (tape length, length / largest bucket, fields of the answer)."""
    length = int(row.outputs[0]['length'])
    answer = {'exit_reason': 'tape read', 'tape_length': length}
    return length, length / self.lengths[-1], answer
