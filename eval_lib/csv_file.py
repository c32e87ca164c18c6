"""Tables as CSV."""

import csv
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any


def write(
  path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]
) -> None:
  """Writes a line for each row below a line of names.

  Args:
    path: the file, which is replaced.
    rows: values by column; what a row lacks is left empty.
  """
  with pathlib.Path(path).open('w', newline='', encoding='utf-8') as file:
    # Not every row has everything: the first may lack what others have.
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(file, list(names))
    writer.writeheader()
    writer.writerows(rows)
