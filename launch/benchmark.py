"""Times models against each other, inside one process.

  python -m launch.benchmark adatape --variant=B/16 --batch_size=8

prints what reading the tape costs of an AdaTape forward, and AdaTape's
throughput as a share of ViT's beside the limit, the share that FLOPs allow;
`--out` writes the same as CSV. Models take turns, so that a machine that slows
down slows all of them; values are `median [first quartile, third quartile]` of
the rounds, ratios are taken within each round. One device is used, inputs are
random, nothing is read from disk. On a CPU start with --variant=Ti/16
--batch_size=4: B/16 takes minutes.
"""

import csv
import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launch import command_line


def parser() -> command_line.Parser:
  """The command line."""
  result = command_line.Parser(
    prog='python -m launch.benchmark',
    description=__doc__,
    epilog='python -m launch.benchmark adatape --help lists the settings',
  )
  commands = result.add_subparsers(dest='command', required=True)
  adatape = commands.add_parser(
    'adatape',
    help='cost of the tape reading; AdaTape against ViT',
    description='AdaTape against ViT, forward and training step.',
    epilog='example: python -m launch.benchmark adatape --variant=S/16 '
    '--batch_size=16 --out=s16.csv',
  )
  add = adatape.add_argument
  add('--variant', default='B/16', metavar='SIZE/PATCH',
      help='Ti, S, B or L, and pixels of a patch (default: B/16)')  # fmt: skip
  add('--batch_size', type=_positive, default=8, metavar='IMAGES',
      help='images per call (default: 8)')  # fmt: skip
  add('--image_size', type=_positive, default=224, metavar='PIXELS',
      help='side of the square images (default: 224)')  # fmt: skip
  add('--bank_size', type=_positive, default=10_000, metavar='TOKENS',
      help='tokens in the learnable bank (default: 10000)')  # fmt: skip
  add('--num_classes', type=_positive, default=1000, metavar='CLASSES')
  add('--dtype', choices=('float32', 'bfloat16'), default='float32',
      help='compute dtype (default: float32)')  # fmt: skip
  add('--phases', choices=('all', 'forward'), default='all',
      help='forward leaves the training steps out, the slow part')  # fmt: skip
  add('--repeats', type=_positive, default=10, metavar='ROUNDS',
      help='rounds that count (default: 10)')  # fmt: skip
  add('--warmup', type=_positive, default=2, metavar='ROUNDS',
      help='rounds before them; the first compiles (default: 2)')  # fmt: skip
  add('--out', default='', metavar='FILE.csv', help='also write the rows here')
  return result


def _positive(text: str) -> int:
  if not text.isdecimal() or int(text) < 1:
    # The type argparse turns into a message that names the flag.
    raise ValueError(text)
  return int(text)


_positive.__name__ = 'positive integer'


def print_rows(rows: Sequence[Any], title: str) -> None:
  """Prints a table for each phase, and one for the readings."""
  import rich.box
  import rich.console
  import rich.table

  def table(title, *headings):
    result = rich.table.Table(
      title=title, box=rich.box.SIMPLE, collapse_padding=True
    )
    for heading in headings:
      result.add_column(heading, no_wrap=True)
    return result

  readings = table(
    'reading the tape, without the projections of the bank',
    'bank', 'ms', '% of the forward',
  )  # fmt: skip
  models = {}
  for row in rows:
    milliseconds = row.seconds.text(scale=1e3)
    if row.flops is None:
      bank = row.what.removeprefix('reading ')
      readings.add_row(bank, milliseconds, row.ratio.text(scale=100.0))
      continue
    if row.phase not in models:
      models[row.phase] = table(
        row.phase, 'model', 'ms', 'GFLOPs', 'throughput / ViT', 'limit'
      )
    models[row.phase].add_row(
      row.what,
      milliseconds,
      f'{row.flops / 1e9:.2f}',
      row.ratio.text(),
      f'{row.flop_limit:.3f}',
    )
  console = rich.console.Console(highlight=False)
  console.print(title, markup=False)
  for one in (readings, *models.values()):
    console.print(one)


def write_csv(
  rows: Sequence[Any], path: str, constants: Mapping[str, Any]
) -> None:
  """Writes a line per row, in seconds and FLOPs; absent values are empty.

  Args:
    rows: of `launch.adatape_benchmark`.
    path: the file, which is replaced.
    constants: columns that are the same in every line.
  """
  from eval_lib.timing import Estimate

  lines = []
  for row in rows:
    line: dict[str, Any] = {}
    for field in dataclasses.fields(row):
      value = getattr(row, field.name)
      if isinstance(value, Estimate):
        line[field.name] = value.median
        line[f'{field.name}_low'] = value.low
        line[f'{field.name}_high'] = value.high
      else:
        line[field.name] = value
    lines.append(line | dict(constants))
  with pathlib.Path(path).open('w', newline='', encoding='utf-8') as file:
    writer = csv.DictWriter(file, list(lines[0]))
    writer.writeheader()
    writer.writerows(lines)


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  try:
    arguments = command_line.parse_arguments(parser(), argv)
    _check_out(arguments.out)
  except command_line.UsageError as error:
    command_line.fail(error)
  # Imported once the command line is known to be right.
  import jax

  from launch import adatape_benchmark

  settings = adatape_benchmark.Settings(
    model=dict(variant=arguments.variant),
    tape=dict(bank_size=arguments.bank_size),
    image_size=arguments.image_size,
    num_classes=arguments.num_classes,
    batch_size=arguments.batch_size,
    dtype=arguments.dtype,
    repeats=arguments.repeats,
    warmup=arguments.warmup,
  )
  try:
    adatape_benchmark.build_models(settings)
  except ValueError as error:
    command_line.fail(f'--{error}')
  rows = adatape_benchmark.run(settings, arguments.phases)
  device = jax.devices()[0].device_kind
  print_rows(
    rows,
    f'{arguments.variant}, {arguments.image_size} px, batch '
    f'{arguments.batch_size}, {arguments.dtype}, {device}; median [quartiles] '
    f'of {arguments.repeats} rounds',
  )
  if arguments.out:
    constants = dict(vars(arguments), device=device, jax=jax.__version__)
    del constants['out'], constants['command'], constants['phases']
    write_csv(rows, arguments.out, constants)
    print(f'written: {arguments.out}')
  return command_line.OK


def _check_out(path: str) -> None:
  if path and not pathlib.Path(path).absolute().parent.is_dir():
    raise command_line.UsageError(
      f'--out: expected a file in a directory that exists, got {path!r}'
    )


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
