"""Rows as a table on the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any


def print_rows(
  title: str, rows: Sequence[Mapping[str, Any]], note: str = ''
) -> None:
  """Prints a table, and a note below it.

  Args:
    title: of the table.
    rows: values by column, the same columns in each; at least one.
    note: may be empty.
  """
  import rich.console
  import rich.table
  import rich.text

  table = rich.table.Table(title=rich.text.Text(title), title_justify='left')
  for place, name in enumerate(rows[0]):
    table.add_column(name, justify='right' if place else 'left')
  for row in rows:
    # What a value has in brackets is no markup.
    table.add_row(*(rich.text.Text(str(value)) for value in row.values()))
  console = rich.console.Console(highlight=False)
  console.print(table)
  if note:
    console.print(note, markup=False, soft_wrap=True)
