"""What halting saves of ALBERT, through the engine, against fixed depth.

The rows of a table: fixed depth scanned, unrolled, and with the engine's forms
of a layer, the masked form, a while_loop, and the engine with exact compaction;
the speed-up over the better of the first two beside the limit, the share that
FLOPs allow, and the largest difference of the logits to the masked form's. With
random parameters the score is set so that tokens take a given mean of the
iterations. The training step of pretraining follows, with and without
rematerialisation.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

from launch import command_line, flag_types
from launch.csv_rows import check_out, write_csv

LENGTH, REPEATS = 128, 10
WIDTH = 110  # characters of the widest table


def _shares(text: str) -> tuple[float, ...]:
  """A flag: shares in (0, 1)."""
  shares = tuple(map(float, text.split(',')))
  if not all(0.0 < share < 1.0 for share in shares):
    raise ValueError(text)
  return shares


_shares.__name__ = 'list of shares between 0 and 1'


def add_arguments(parser: Any) -> None:
  """The settings of `launch.benchmark albert`."""
  add = parser.add_argument
  add('--variant', default='small', metavar='NAME',
      help='sizes, such as small, the paper\'s of 12 iterations, or mini '
      '(default: small)')  # fmt: skip
  add('--length', type=flag_types.positive, default=LENGTH, metavar='TOKENS',
      help=f'of a row (default: {LENGTH})')  # fmt: skip
  add('--batch', type=flag_types.sizes, default='1,8', metavar='ROWS,...',
      help='rows at a time (default: 1,8)')  # fmt: skip
  add('--shares', type=_shares, default='0.42,0.25', metavar='SHARE,...',
      help='mean over most iterations (default: 0.42,0.25)')  # fmt: skip
  add('--iterations', type=flag_types.positive, default=12, metavar='COUNT',
      help='in a stage of the engine (default: 12)')  # fmt: skip
  add('--train_batch', type=flag_types.count, default=0, metavar='ROWS',
      help='also time the training step with so many rows')  # fmt: skip
  add('--dtype', choices=('float32', 'bfloat16'), default='float32',
      help='compute dtype (default: float32)')  # fmt: skip
  add('--repeats', type=flag_types.positive, default=REPEATS, metavar='ROUNDS',
      help=f'rounds that count (default: {REPEATS})')  # fmt: skip
  add('--out', default='', metavar='FILE.csv',
      help='also write the rows here, and those of the training step to '
      'FILE_train.csv')  # fmt: skip


def run(arguments: Any) -> int:
  """Runs the command; returns its exit code."""
  from launch import albert_benchmark, albert_train_benchmark
  from model_lib import sizes

  settings = albert_benchmark.Settings(
    variant=arguments.variant,
    length=arguments.length,
    batches=arguments.batch,
    shares=arguments.shares,
    iterations=arguments.iterations,
    dtype=arguments.dtype,
    repeats=arguments.repeats,
  )
  try:
    check_out(arguments.out)
    train_out = _train_out(arguments.out)
    check_out(train_out)
    sizes.ALBERT.fields(arguments.variant)
  except command_line.UsageError as error:
    command_line.fail(error)
  except ValueError as error:
    command_line.fail(f'--{error}')
  rows = albert_benchmark.run(settings)
  print_rows(rows)
  _write(rows, arguments.out, arguments)
  if arguments.train_batch:
    size = arguments.train_batch
    steps = albert_train_benchmark.train(settings, size)
    print_train(steps)
    _write(steps, train_out, arguments, batch=size)
  return command_line.OK


def _train_out(out: str) -> str:
  """The file of the training step beside that of `--out`; '' without one."""
  path = pathlib.Path(out)
  return str(path.with_stem(f'{path.stem}_train')) if out else ''


def _write(
  rows: Sequence[Any], path: str, arguments: Any, **others: Any
) -> None:
  """Writes rows, with what they were measured with; nothing without a path."""
  if not path:
    return
  import jax

  constants = dict(
    variant=arguments.variant,
    length=arguments.length,
    dtype=arguments.dtype,
    device=jax.devices()[0].device_kind,
    jax=jax.__version__,
  )
  write_csv(rows, path, constants | others)
  print(f'written: {path}')


def print_rows(rows: Sequence[Any]) -> None:
  """Prints the forms of every setting."""
  table = _table(
    'batch', 'mean', 'executed', 'form', 'ms', 'speed-up', 'limit',
    'difference',
  )  # fmt: skip
  for row in rows:
    is_dense = row.limit is None
    table.add_row(
      str(row.batch),
      f'{row.mean_share:.2f}',
      f'{row.depth_share:.2f}',
      row.what,
      row.seconds.text(scale=1e3),
      row.speed_up.text(),
      '' if is_dense else f'{row.limit:.2f}',
      '' if is_dense else f'{row.difference:.1e}',
    )
  _print(table)


def print_train(rows: Sequence[Any]) -> None:
  """Prints the training steps."""
  table = _table(
    'training step', 'iterations', 'ms', 'over fixed depth', 'temporary MiB'
  )
  for row in rows:
    table.add_row(
      row.what,
      str(row.iterations),
      row.seconds.text(scale=1e3),
      row.slow_down.text(),
      f'{row.temporary_bytes / 2**20:.0f}',
    )
  _print(table)


def _table(*headings: str) -> Any:
  import rich.box
  import rich.table

  table = rich.table.Table(box=rich.box.SIMPLE, collapse_padding=True)
  for heading in headings:
    table.add_column(heading, no_wrap=True)
  return table


def _print(table: Any) -> None:
  import rich.console

  console = rich.console.Console(highlight=False)
  # A terminal that is narrower wraps; a column that is cut says nothing.
  console.width = max(console.width, WIDTH)
  console.print(table)
