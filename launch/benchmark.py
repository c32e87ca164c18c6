"""Times models against each other.

  python -m launch.benchmark adatape --variant=B/16 --batch_size=8

prints what reading the tape costs of an AdaTape forward, and AdaTape's
throughput as a share of ViT's beside the limit, the share that FLOPs allow.

  python -m launch.benchmark eat --workdir=/tmp/sst2_eat --dense=/tmp/sst2 \\
      --out=/tmp/report

sweeps the exits and keep ratios of a trained EAT, and times the best of them
against dense models, ours and others', on the rows of its task.

  python -m launch.benchmark eat_speed --variant=base --batch=1,16,32

prints what pruning and exits save over the best dense form of BERT, through
the engine, beside the limit, and PyTorch and ONNX Runtime on the same weights.

  python -m launch.benchmark albert --variant=small --batch=1,8

prints what halting saves of ALBERT, through the engine, beside the limit.

Contenders take turns, so that a machine that slows down slows all of them;
values are `median [first quartile, third quartile]` of the rounds, ratios are
taken within each round. `--out` writes the same as CSV. One device is used,
and inputs are random but for `eat`. Models of full size take minutes on a CPU:
start with `adatape --variant=Ti/16 --batch_size=4` or `eat_speed
--variant=mini --depth=6`.
"""

import sys
from collections.abc import Sequence
from typing import Any

from launch import albert_speed, command_line, flag_types
from launch.csv_rows import check_out, write_csv
from launch.eat_report import command as eat_report
from launch.eat_speed import command as eat_speed


def parser() -> command_line.Parser:
  """The command line."""
  result = command_line.Parser(
    prog='python -m launch.benchmark',
    description=__doc__,
    epilog='python -m launch.benchmark COMMAND --help lists the settings',
  )
  commands = result.add_subparsers(dest='command', required=True)
  adatape = commands.add_parser(
    'adatape',
    help='cost of the tape reading; AdaTape against ViT',
    description='AdaTape against ViT, forward and training step.',
    epilog='example: python -m launch.benchmark adatape --variant=S/16 '
    '--batch_size=16 --out=s16.csv',
  )
  _add_adatape_arguments(adatape)
  albert = commands.add_parser(
    'albert',
    help='ALBERT whose tokens halt against fixed depth',
    description=albert_speed.__doc__,
    epilog='example: python -m launch.benchmark albert --variant=mini '
    '--batch=1,8,32 --train_batch=8 --out=mini.csv',
  )
  albert_speed.add_arguments(albert)
  speed = commands.add_parser(
    'eat_speed',
    help='EAT in the engine against dense BERTs, PyTorch and ONNX Runtime',
    description=eat_speed.__doc__,
    epilog='example: python -m launch.benchmark eat_speed --variant=mini '
    '--depth=6 --batch=1,8 --rounds=3 --out=mini.csv',
  )
  eat_speed.add_arguments(speed)
  report = commands.add_parser(
    'eat',
    help='quality and speed of a trained EAT, from its checkpoint',
    description=eat_report.__doc__,
    epilog=command_line.EXIT_CODES,
  )
  eat_report.add_arguments(report)
  return result


def _add_adatape_arguments(adatape: Any) -> None:
  add = adatape.add_argument
  add('--variant', default='B/16', metavar='SIZE/PATCH',
      help='Ti, S, B or L, and pixels of a patch (default: B/16)')  # fmt: skip
  add('--batch_size', type=flag_types.positive, default=8, metavar='IMAGES',
      help='images per call (default: 8)')  # fmt: skip
  add('--image_size', type=flag_types.positive, default=224, metavar='PIXELS',
      help='side of the square images (default: 224)')  # fmt: skip
  add('--bank_size', type=flag_types.positive, default=10_000, metavar='TOKENS',
      help='tokens in the learnable bank (default: 10000)')  # fmt: skip
  add(
    '--num_classes', type=flag_types.positive, default=1000, metavar='CLASSES'
  )
  add('--dtype', choices=('float32', 'bfloat16'), default='float32',
      help='compute dtype (default: float32)')  # fmt: skip
  add('--phases', choices=('all', 'forward'), default='all',
      help='forward leaves the training steps out, the slow part')  # fmt: skip
  add('--repeats', type=flag_types.positive, default=10, metavar='ROUNDS',
      help='rounds that count (default: 10)')  # fmt: skip
  add('--warmup', type=flag_types.positive, default=2, metavar='ROUNDS',
      help='rounds before them; the first compiles (default: 2)')  # fmt: skip
  add('--out', default='', metavar='FILE.csv', help='also write the rows here')


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


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  try:
    arguments = command_line.parse_arguments(parser(), argv)
  except command_line.UsageError as error:
    command_line.fail(error)
  return _RUN[arguments.command](arguments)


def _run_adatape(arguments: Any) -> int:
  try:
    check_out(arguments.out)
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


_RUN = {
  'adatape': _run_adatape,
  'albert': albert_speed.run,
  'eat': eat_report.run,
  'eat_speed': eat_speed.run,
}


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
