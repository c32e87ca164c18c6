"""How far the preparation of a corpus is, and what became of the texts."""

import pathlib
from collections.abc import Callable
from types import TracebackType
from typing import Any


class Progress:
  """Bars on stderr, with the time left; a context manager."""

  def __init__(self) -> None:
    import rich.console
    import rich.progress

    self._bar = rich.progress.Progress(
      *rich.progress.Progress.get_default_columns(),
      rich.progress.TimeElapsedColumn(),
      console=rich.console.Console(stderr=True),
    )

  def __call__(self, stage: str, total: int) -> Callable[[int], None]:
    """A bar for one stage; returns what is called with the bytes done."""
    task = self._bar.add_task(stage, total=max(total, 1))
    return lambda done: self._bar.advance(task, done)

  def __enter__(self) -> 'Progress':
    self._bar.start()
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self._bar.stop()


def report(manifest: dict[str, Any], out: str) -> None:
  """Prints what was written, and a table of what was repaired or left out."""
  import rich.box
  import rich.console
  import rich.table

  from dataset_lib import corpus

  console = rich.console.Console(highlight=False, markup=False)
  counts = rich.table.Table(box=rich.box.SIMPLE_HEAD)
  for name in ('', *manifest['splits']):
    counts.add_column(name, justify='right' if name else 'left')
  names = list(next(iter(manifest['splits'].values())))
  for name in names:
    values = [split[name] for split in manifest['splits'].values()]
    counts.add_row(name.replace('_', ' '), *(f'{n:,}' for n in values))
  console.print(counts)
  files = pathlib.Path(out, corpus.FAULTS_FILE)
  _report_faults(manifest['faults'], files, console)
  console.print(
    f'written: {out} (vocabulary of {manifest["vocab_size"]:,}, rows of at '
    f'most {manifest["max_length"]} tokens)',
    soft_wrap=True,
  )


def _report_faults(
  faults: dict[str, Any], files: pathlib.Path, console: Any
) -> None:
  import rich.box
  import rich.table

  if not faults:
    console.print('no faults in the text')
    return
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
  table.add_column('what was found')
  table.add_column('times', justify='right')
  table.add_column('what was done')
  for kind, entry in faults.items():
    name = kind.replace('_', ' ')
    table.add_row(name, f'{entry["count"]:,}', entry['action'])
  console.print(table)
  console.print('The first of each:')
  for kind, entry in faults.items():
    first = entry['first'][0]
    place = ': '.join(filter(None, (first['where'], first['message'])))
    # Not in the table, which would break the names of files.
    console.print(f'  {kind.replace("_", " ")}: {place}', soft_wrap=True)
  if files.exists():
    console.print(f'All files that were left out: {files}', soft_wrap=True)
