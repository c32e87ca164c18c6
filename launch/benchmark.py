"""Times models against each other.

  python -m launch.benchmark adatape --variant=B/16 --batch=8
  python -m launch.benchmark albert --variant=small --batch=1,8
  python -m launch.benchmark eat_speed --variant=base --batch=1,16,32
  python -m launch.benchmark eat --workdir=/tmp/sst2_eat --dense=/tmp/sst2 \\
      --out=/tmp/report

`adatape` compares AdaTape with ViT and gives the cost of reading the tape,
`albert` the engine with exact compaction to fixed depth, `eat_speed` EAT in the
engine with dense BERTs of ours, of PyTorch and of ONNX Runtime; `eat` reports
quality and speed of a trained EAT on the rows of its task.

Candidates take turns, so that a machine that slows down slows all of them.
Values are `median [first quartile, third quartile]` of the rounds; ratios are
taken within each round. `limit` is the speed-up that FLOPs allow. `--out` also
writes CSV files and a picture. Models of full size take minutes on a CPU; begin
with `adatape --variant=Ti/16 --batch=4` or `eat_speed --variant=mini
--depth=6`. All cores are used: restrict them with taskset.
"""

import importlib
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Interval, Predicate

from dataset_lib import fields
from eval_lib import report
from eval_lib.report import Rows
from launch import command_line
from launch.command_line import (
  checkpoint,
  count,
  percents,
  positive,
  seconds,
  sizes,
)

MODULES = {
  'adatape': 'launch.candidates_adatape',
  'albert': 'launch.candidates_albert',
  'eat_speed': 'launch.candidates_eat',
  'eat': 'launch.eat_report',
}
BUSY_LOAD = 0.5  # average number of running threads
TOLERANCE = {'float32': 1e-4, 'bfloat16': 5e-2}  # of outputs of a group


def _is_writable(text: str) -> bool:
  path = pathlib.Path(text).absolute()
  return not text or (not path.is_dir() and os.access(path.parent, os.W_OK))


def _are_runs(items: Sequence[str]) -> bool:
  pairs = [item.partition('=')[::2] for item in items]
  names = {'EAT', 'dense', 'student', *dict(pairs)}
  return all(map(all, pairs)) and len(names) == 3 + len(pairs)


Share = Annotated[float, Interval(gt=0.0, lt=1.0)]
Scale = Annotated[float, Interval(ge=0.0, lt=1e3)]
Length = Annotated[int, Interval(ge=1, le=512)]  # tokens of a BERT
Even = Annotated[
  int, Predicate(lambda n: n >= 0 and n % 2 == 0), 'even integer'
]
Lengths = tuple[Length, ...] | Literal['none']
Libraries = tuple[Literal['torch', 'onnx'], ...] | Literal['none']
Phases = Literal['all', 'forward']
Groups = Annotated[
  tuple[Literal['dense', 'eat', 'torch', 'onnx'], ...],
  Predicate(lambda names: 'dense' in names),
  'list of dense, eat, torch, onnx, with dense among them',
]
Runs = Annotated[
  tuple[str, ...], Predicate(_are_runs), 'list of NAME=DIRECTORY with new names'
]
File = Annotated[
  str, Predicate(_is_writable), 'file in a directory that is writable'
]
# Names, type, default, help. `None` as default: the flag is needed.
_TIMING: list[Any] = [
  ('--warmup', count, 2, 'rounds before those that count'),
  ('--dtype', Literal['float32', 'bfloat16'], 'float32', 'compute dtype'),
  ('--out', File, '', 'FILE.csv: writes the rows here, a picture beside it'),
]
FLAGS: Mapping[str, tuple[str, list[Any]]] = {
  'adatape': ('AdaTape against ViT, and the cost of reading the tape', [
    ('--variant', str, 'B/16', 'Ti, S, B or L, and pixels of a patch'),
    ('--batch --batch_size', positive, 8, 'images per call'),
    ('--image_size', positive, 224, 'side of the square images, in pixels'),
    ('--bank_size', positive, 10_000, 'tokens in the learnable bank'),
    ('--num_classes', positive, 1000, 'of the head'),
    ('--phases', Phases, 'all', 'forward: no training steps'),
    ('--rounds --repeats', positive, 10, 'that count'),
    *_TIMING,
  ]),
  'albert': ('ALBERT whose tokens halt, against fixed depth', [
    ('--variant', str, 'small', 'micro, mini, tiny, small or base'),
    ('--length', Length, 128, 'tokens of a row'),
    ('--batch', sizes, '1,8', 'rows at a time'),
    ('--shares', tuple[Share, ...], '0.42,0.25', 'mean over most iterations'),
    ('--iterations', positive, 12, 'in a stage of the engine'),
    ('--train_batch', count, 0, 'rows: also times the training step'),
    ('--rounds --repeats', positive, 10, 'that count'),
    *_TIMING,
  ]),
  'eat_speed': ('EAT in the engine, against dense BERTs of three libraries', [
    ('--variant', str, 'base', 'of BERT: tiny, mini, small, medium, base, ...'),
    ('--depth', count, 0, "layers, even, 6 or more; 0 for the variant's"),
    ('--length', Length, 128, 'tokens of every row'),
    ('--batch', sizes, '1,16,32', 'rows; at 1 requests come one by one'),
    ('--exit_rates', percents, '0,50,80,95', 'of rows that leave at layer 4'),
    ('--window', Even, 0, 'tokens of the attention of EAT, even; 0 for none'),
    ('--candidates --contenders', Groups, 'dense,eat,torch,onnx',
     'dense is needed'),
    ('--min_seconds', seconds, 0.5, 'of the calls of a round'),
    ('--fill', positive, 8, 'batches that a call of the engine fills'),
    ('--length_buckets', Lengths, '16,32,64,128,256',
     'compared with padding all rows to the last; none for no such table'),
    ('--length_rows', positive, 64, 'of that table'),
    ('--lengths_from', str, '', 'DIRECTORY of a GLUE task: takes their lengths '
     'from its validation split, instead of a log-normal law'),
    ('--task', str, 'sst2', 'the GLUE task'),
    ('--vocabulary', str, '', 'for its texts: a tokenizer, or vocab.txt'),
    ('--rounds --repeats', positive, 7, 'that count'),
    *_TIMING,
  ]),
  'eat': ('quality and speed of a trained EAT, from its checkpoint', [
    ('--workdir', str, None, 'the EAT run'),
    ('--dense', str, '', 'a dense run on the same data'),
    ('--student', str, '', 'a run of a smaller dense model'),
    ('--ablation', Runs, (), 'NAME=DIRECTORY,...: runs for the ablation'),
    ('--out', str, None, 'DIRECTORY: where to write'),
    ('--step', checkpoint, 'latest', 'of the EAT run: latest, best, a number'),
    ('--split', str, '', "instead of that of the run's evaluation dev"),
    ('--limit', count, 0, 'rows of the split, the first; 0 for all'),
    ('--prune_scales', tuple[Scale, ...], '0,0.5,1', 'of the prune ratios'),
    ('--tau', Share, 0.9, 'of the default setting, confidence'),
    ('--time', str, 'auto', 'auto (never, the default and the frontier), all, '
     'none, or names such as confidence=0.9,prune_0.5/never'),
    ('--rows', positive, 1000, 'to time, at most'),
    ('--warmup', count, 50, 'calls of each setting before those that count'),
    ('--rounds --repeats', positive, 3, 'that count'),
    ('--batch_size', positive, 32, 'rows of a full batch'),
    ('--guarantee', bool, False, 'resamples the rows: how often does it fail?'),
    ('--epsilon', Share, 0.02, 'bound on the risk'),
    ('--delta', Share, 0.1, 'how often the bound may fail'),
    ('--draws', positive, 200, 'resamplings'),
    ('--sentences', count, 8, 'rows to draw'),
    ('--peers', Libraries, 'torch,onnx', 'also run the dense run and the '
     'student, as far as installed; or none'),
  ]),
}  # fmt: skip


def _type(hint: Any) -> Callable[[str], Any]:
  """Returns a type of argparse, which prints its name."""
  if hint in vars(command_line).values():
    return hint

  def read(text: str) -> Any:
    value = fields.check_value('', fields.Unread(text), hint)
    return () if value == 'none' else value

  read.__name__ = fields.describe(hint)
  return read


def parser() -> command_line.Parser:
  """Returns the parser of the command line."""
  result = command_line.Parser(
    prog='python -m launch.benchmark',
    description=__doc__,
    epilog='python -m launch.benchmark COMMAND --help lists the settings',
  )
  commands = result.add_subparsers(dest='command', required=True)
  for name, (text, flags) in FLAGS.items():
    command = commands.add_parser(
      name, help=text, description=text, epilog=command_line.EXIT_CODES
    )
    for names, kind, default, words in flags:
      options = {'default': default, 'help': words}
      if default:
        options['help'] += ' (default: %(default)s)'
      if kind is bool:
        options['action'] = 'store_true'
      else:
        options |= {'type': _type(kind), 'required': default is None}
      command.add_argument(*names.split(), **options)
  return result


def parse(argv: Sequence[str]) -> tuple[Any]:
  """Returns the arguments.

  Raises:
    UsageError: names the flag.
  """
  arguments = command_line.parse_arguments(parser(), argv)
  if arguments.command == 'eat':
    command_line.check_place('--out', arguments.out)
  elif arguments.command == 'eat_speed':
    vocabulary = arguments.vocabulary
    if bool(arguments.lengths_from) != bool(vocabulary):
      expected = 'it with --lengths_from, and only then'
      message = f'--vocabulary: expected {expected}, got {vocabulary!r}'
      raise command_line.UsageError(message)
  return (arguments,)


def run(arguments: Any) -> int:
  """Times the candidates; prints and writes the tables."""
  # Imported once the command line is known to be right.
  family = importlib.import_module(MODULES[arguments.command])
  settings = dict(vars(arguments))
  if settings.pop('command') == 'eat':
    family.write(settings)
    return command_line.OK
  import jax

  from model_lib.errors import FieldError

  if (load := os.getloadavg()[0]) > BUSY_LOAD:
    print(f'busy machine: load {load:.1f} before the start; compare nothing')
  constants = {'device': jax.devices()[0].device_kind, 'jax': jax.__version__}
  for name, value in settings.items():
    if isinstance(value, (int, float, str)) and value and name != 'out':
      constants[name] = value
  print(', '.join(f'{name} {value}' for name, value in constants.items()))
  try:
    for name, rows in family.tables(settings):
      show(rows, TOLERANCE[settings['dtype']])
      if arguments.out:
        path = pathlib.Path(arguments.out)
        path = path.with_stem(f'{path.stem}_{name}') if name else path
        report.write_csv(path, rows, constants)
        draw(path, rows)
        print(f'written: {path}')
  except FieldError as error:
    command_line.fail(f'--{error}')
  return command_line.OK


def show(table: Rows, tolerance: float) -> None:
  """Prints a table for each case, empty columns left out.

  Differences of outputs above `tolerance` within a group are reported.
  """
  for case in dict.fromkeys(map(_case, table)):
    same = [row for row in table if _case(row) == case]
    baselines = {row['baseline'] for row in same}
    columns = list(dict.fromkeys(name for row in same for name in row))
    shown = [
      name
      for name in columns[columns.index('candidate') :]
      if any(row.get(name) is not None for row in same)
      and (name != 'baseline' or len(baselines) > 1)
    ]
    cells = [report.readable(row, shown) for row in same]
    title = f'{case}; baseline: {same[0]["baseline"]}'
    report.print_table(title, cells, 'median [quartiles] of the rounds')
    for row in same:
      if not (row.get('difference') or 0.0) <= tolerance:
        print(
          f'WARNING: {row["candidate"]}: output {row["difference"]:.2g} from '
          f'that of the same weights; expected at most {tolerance:.2g}'
        )


def draw(path: pathlib.Path, table: Rows) -> None:
  """Draws the speed-ups of the candidates that were timed in all cases."""
  from eval_lib import adaptive_plots

  bars: dict[str, dict[str, Any]] = {}
  for row in table:
    bars.setdefault(row['candidate'], {})[_case(row)] = row['speedup']
  panels = max(map(len, bars.values()))
  bars = {name: one for name, one in bars.items() if len(one) == panels}
  try:
    adaptive_plots.plot_ablation(path, bars, title='Speed-up over the baseline')
  except ImportError as error:
    print(f'no picture: {error}')


def _case(row: Mapping[str, Any]) -> str:
  """Returns the labels of a row: its columns before the candidate."""
  names = list(row)[: list(row).index('candidate')]
  return ', '.join(f'{name} {row[name]}' for name in names)


def main(argv: Sequence[str]) -> int:
  """Runs the command line; returns its exit code."""
  return command_line.main(parse, run, argv)


if __name__ == '__main__':
  # A process of a candidate imports this module under another name.
  sys.exit(main(sys.argv[1:]))
