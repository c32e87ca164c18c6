"""The speed of EAT (30 % pruned after layers 2 and 4, exit at 4) through the
engine, where a planned share of the rows leaves at the exit, and of everything
that it has to beat: dense BERT of ours in five forms (unrolled, scanned,
chunked, one program per layer, the chain that the engine runs), of PyTorch and
of ONNX Runtime, and models of DistilBERT's shape (half the layers). The same
random weights and token ids for all, NumPy arrays in and out, every contender
in a process of its own. Peers need the extra [peers] and are left out without.

Columns: ms per example; FLOPs that are computed; speed-up over the best dense
form of ours (the one with the smallest median; the title names it); the
speed-up that FLOPs allow, every block counted once and in full, and which share
of it was reached; speed-up over PyTorch's BERT and DistilBERT.

All processes use all cores that this one may use: restrict them with taskset.
Full size takes about an hour and 15 GB on a small CPU; --batch=1 a tenth.
"""

import dataclasses
import functools
from typing import Any

from launch import command_line, flag_types
from launch.csv_rows import check_out, write_csv
from launch.eat_speed.lineup import GROUPS, Settings, fields

_WIDTH = 128  # of tables in a file


def add_arguments(parser: Any) -> None:
  """Adds the flags to a parser."""
  add = parser.add_argument
  add('--variant', default='base', metavar='NAME',
      help='of the encoder: tiny, mini, small, medium, minilm, base, large '
      '(default: base)')  # fmt: skip
  add('--depth', type=flag_types.count, default=0, metavar='LAYERS',
      help="even, 6 or more; 0 for the variant's (default: 0)")  # fmt: skip
  add('--length', type=flag_types.positive, default=128, metavar='TOKENS',
      help='of every row (default: 128)')  # fmt: skip
  add('--batch', type=flag_types.sizes, default='1,16,32', metavar='ROWS,...',
      help='a table for each; at 1 a request is sent when the one before is '
      'answered (default: 1,16,32)')  # fmt: skip
  add('--exit_rates', type=flag_types.percents, default='0,50,80,95',
      metavar='PERCENT,...',
      help='of rows that leave at layer 4 (default: 0,50,80,95)')  # fmt: skip
  add('--window', type=flag_types.count, default=0, metavar='TOKENS',
      help='of the attention of EAT; 0 for none, the fastest up to length 128: '
      'attention is a few percent of a layer there (default: 0)')  # fmt: skip
  add('--dtype', choices=('float32', 'bfloat16'), default='float32',
      help='compute dtype, of PyTorch too (default: float32)')  # fmt: skip
  add('--platform', default='', metavar='NAME',
      help='of jax: cpu, cuda, tpu; cpu also keeps the peers on the CPU '
      "(default: jax's own choice)")  # fmt: skip
  add('--contenders', type=_groups, default='dense,eat,distil,torch,onnx',
      metavar='GROUP,...',
      help='default: dense,eat,distil,torch,onnx; dense is needed')  # fmt: skip
  add('--rounds', type=flag_types.positive, default=7,
      help='that count (default: 7)')  # fmt: skip
  add('--warmup', type=flag_types.positive, default=2, metavar='ROUNDS',
      help='before them; nothing compiles there (default: 2)')  # fmt: skip
  add('--min_seconds', type=flag_types.seconds, default=0.5, metavar='SECONDS',
      help='calls are repeated so long in a round (default: 0.5)')  # fmt: skip
  add('--fill', type=flag_types.positive, default=8, metavar='BATCHES',
      help='that a call of the engine fills, or more (default: 8)')  # fmt: skip
  add('--timeout', type=flag_types.seconds, default=1800.0, metavar='SECONDS',
      help='after which a process counts as hung (default: 1800)')  # fmt: skip
  add('--length_buckets', type=flag_types.sizes_or_none,
      default='16,32,64,128,256', metavar='TOKENS,...',
      help='of the table that compares them with padding all to the last; none '
      'for no such table (default: 16,32,64,128,256)')  # fmt: skip
  add('--length_rows', type=flag_types.positive, default=64, metavar='ROWS',
      help='of that table (default: 64)')  # fmt: skip
  add('--lengths_from', default='', metavar='FILE.tsv[.gz]',
      help='takes their lengths from texts (default: log-normal, median 24 '
      'tokens, sigma 0.5)')  # fmt: skip
  add('--column', default='sentence', metavar='NAME[,NAME]',
      help='of the text in it, or of a pair (default: sentence)')  # fmt: skip
  add('--vocabulary', default='', metavar='PATH',
      help='for that file: directory of a tokenizer, or vocab.txt')  # fmt: skip
  add('--out', default='', metavar='FILE.csv',
      help='also write the rows here')  # fmt: skip


def _groups(text: str) -> tuple[str, ...]:
  names = text.split(',')
  if not {'dense'} <= {*names} <= {*GROUPS}:
    raise ValueError(text)
  return tuple(names)


_groups.__name__ = f'list of {", ".join(GROUPS)}, with dense among them'


def settings_of(arguments: Any) -> Settings:
  """The settings that the flags say.

  Raises:
    UsageError: they contradict each other.
  """
  check_out(arguments.out)
  names = 'variant depth length exit_rates window dtype rounds warmup'
  names += ' min_seconds fill platform timeout'
  settings = Settings(
    batches=arguments.batch,
    groups=arguments.contenders,
    length_buckets=arguments.length_buckets,
    **{name: getattr(arguments, name) for name in names.split()},
  )
  if settings.window % 2:
    raise command_line.UsageError(
      f'--window: expected an even number, got {settings.window}'
    )
  if bool(arguments.lengths_from) != bool(arguments.vocabulary):
    raise command_line.UsageError(
      '--vocabulary: expected it with --lengths_from, and only then'
    )
  try:
    most = fields(settings, 'bert')['max_positions']
  except ValueError as error:
    raise command_line.UsageError(f'--{error}') from error
  if settings.length_buckets and settings.length_buckets[-1] > most:
    raise command_line.UsageError(
      f'--length_buckets: expected at most {most}, got '
      f'{settings.length_buckets[-1]}'
    )
  return settings


def _with_lengths(settings: Settings, arguments: Any) -> Settings:
  """The settings with the lengths of the rows of the table of lengths."""
  if not settings.length_buckets:
    return settings
  from launch.eat_speed import text_lengths

  longest = settings.length_buckets[-1]
  if not arguments.lengths_from:
    lengths = text_lengths.synthetic(arguments.length_rows, longest)
  else:
    lengths = text_lengths.of_file(
      arguments.lengths_from,
      arguments.column.split(','),
      arguments.vocabulary,
      arguments.length_rows,
      longest,
    )
  return dataclasses.replace(settings, row_lengths=lengths)


def run(arguments: Any) -> int:
  """Runs the command with parsed arguments; returns its exit code."""
  try:
    settings = settings_of(arguments)
  except command_line.UsageError as error:
    command_line.fail(error)
  return command_line.run(lambda: _run(settings, arguments))


def _run(settings: Settings, arguments: Any) -> int:
  # Imported once the command line is known to be right.
  import rich.console

  from launch.eat_speed import race, tables

  settings = _with_lengths(settings, arguments)
  report = functools.partial(print, flush=True)
  try:
    table, lengths = race.run(settings, report)
  except KeyboardInterrupt:
    command_line.fail(
      'interrupted; all processes have ended', command_line.INTERRUPTED
    )
  console = rich.console.Console(highlight=False, markup=False)
  if not console.is_terminal:
    console.width = _WIDTH
  print(
    f'{settings.variant}, {fields(settings, "bert")["depth"]} layers, length '
    f'{settings.length}, {settings.dtype}, window {settings.window}; median '
    f'[quartiles] of {settings.rounds} rounds'
  )
  tables.print_rows(table, console)
  source = arguments.lengths_from or 'log-normal lengths'
  tables.print_length_rows(
    lengths,
    f'{len(settings.row_lengths)} rows ({source}) in length buckets '
    f'{settings.length_buckets}, batches up to {settings.capacity}',
    console,
  )
  if arguments.out:
    constants = {
      name: str(value)
      for name, value in vars(arguments).items()
      if name not in ('out', 'command', 'batch')
    }
    write_csv([*table, *lengths], arguments.out, constants)
    print(f'written: {arguments.out}')
  return command_line.OK
