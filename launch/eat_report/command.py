"""Quality and speed of a trained EAT, against a dense model and a student.

  python -m launch.benchmark eat --workdir=/tmp/sst2_eat --dense=/tmp/sst2 \\
      --student=/tmp/sst2_student --out=/tmp/report

Every model is run once over the split; exit rules, thresholds, veto margins
and keep ratios are swept over the recorded logits. The chosen settings
(`--time`) are then timed through the engine, in turns with the dense model and
the student: rows alone, and in full batches. With the extra [peers], PyTorch
with Hugging Face and ONNX Runtime run the same dense weights in turns with
ours. Tokenising is not timed. FLOPs are by formula: `flops` for the length of
each row, `flops_served` for its length bucket, which the engine really runs;
the FLOP limit beside the measured speed-ups is that of the latter. Calibration
errors are those of the rows that the temperatures were not fitted to. Written
into `--out`:

  settings.csv     quality, depth, retention and FLOPs of all settings
  timings.csv      latency and throughput of the timed ones
  examples.csv     each row with each timed setting
  calibration.csv  ECE of each head before and after its temperature
  guarantee.csv    with --guarantee: how often the guaranteed threshold fails
  result.json      the main numbers, with --dense the fastest settings that
                   lose at most 0.5, 1 and 2 points against it
  *.png, *.pdf     frontier, frontier_batch, frontier_flops, exits, retention,
                   reliability_<layer>, ablation, sentences (also .html)

Runs to compare for the ablation, each at its default setting:

  --ablation=pruning=/tmp/run_p,window=/tmp/run_w,exits=/tmp/run_e
"""

import pathlib
from typing import Any

from launch import command_line, flag_types, peers

SCALES = '0,0.5,1'


def add_arguments(parser: Any) -> None:
  """Adds the flags to a parser."""
  add = parser.add_argument
  add('--workdir', required=True, metavar='DIRECTORY', help='the EAT run')
  add('--dense', default='', metavar='DIRECTORY',
      help='a dense run on the same data, to compare with')  # fmt: skip
  add('--student', default='', metavar='DIRECTORY',
      help='a run of a smaller dense model')  # fmt: skip
  add('--ablation', default='', metavar='NAME=DIRECTORY,...',
      help='further runs, for the ablation')  # fmt: skip
  add('--out', required=True, metavar='DIRECTORY', help='where to write')
  add('--step', type=flag_types.checkpoint, default='latest', metavar='STEP',
      help='of the EAT run: latest (default), best, or a number')  # fmt: skip
  add('--split', default='', metavar='SPLIT',
      help="default: that of the run's evaluation dev")  # fmt: skip
  add('--limit', type=flag_types.count, default=0, metavar='ROWS',
      help='so many rows of the split, always the same')  # fmt: skip
  add('--prune_scales', default=SCALES, metavar='SCALE,...',
      help=f'of the prune ratios (default: {SCALES})')  # fmt: skip
  add('--tau', type=float, default=0.9, metavar='TAU',
      help='of the default setting, confidence (default: 0.9)')  # fmt: skip
  add('--time', default='auto', metavar='SETTING,...',
      help='what is timed: auto (never, the default and the frontier), all, '
      'none, or names such as confidence=0.9,prune_0.5/never')  # fmt: skip
  add('--most', type=flag_types.positive, default=6, metavar='POINTS',
      help='of the frontier to time with auto (default: 6)')  # fmt: skip
  add('--rows', type=flag_types.positive, default=1000, metavar='ROWS',
      help='to time, at most (default: 1000)')  # fmt: skip
  add('--warmup', type=flag_types.count, default=50, metavar='CALLS',
      help='of each setting before (default: 50)')  # fmt: skip
  add('--repeats', type=flag_types.positive, default=3, metavar='ROUNDS',
      help='default: 3')  # fmt: skip
  add('--batch_size', type=flag_types.positive, default=32, metavar='ROWS',
      help='of a full batch (default: 32)')  # fmt: skip
  add('--guarantee', action='store_true',
      help='resample the rows: how often does it fail?')  # fmt: skip
  add('--epsilon', type=float, default=0.02, metavar='SHARE',
      help='bound on the risk (default: 0.02)')  # fmt: skip
  add('--delta', type=float, default=0.1, metavar='SHARE',
      help='how often the bound may fail (default: 0.1)')  # fmt: skip
  add('--draws', type=flag_types.positive, default=200, metavar='TIMES',
      help='resamplings (default: 200)')  # fmt: skip
  add('--sentences', type=flag_types.count, default=8, metavar='ROWS',
      help='to draw (default: 8)')  # fmt: skip
  add('--peers', type=_peers, default='torch,onnx', metavar='PEER,...',
      help='who also runs the dense run and the student: torch, onnx; none for '
      'nobody (default: torch,onnx, as far as installed)')  # fmt: skip
  add('--compilation_cache', default='', metavar='DIRECTORY',
      help='keeps compiled programs for the next start')  # fmt: skip


def _peers(text: str) -> tuple[str, ...]:
  names = () if text == 'none' else tuple(text.split(','))
  if not {*names} <= {*peers.PACKAGES}:
    raise ValueError(text)
  return names


_peers.__name__ = f'list of {", ".join(peers.PACKAGES)}, or none'


def check(arguments: Any) -> dict[str, Any]:
  """What the flags say that argparse does not read; touches no device.

  Returns:
    `scales` and `ablation`.

  Raises:
    UsageError: a flag is illegal.
  """
  for flag in ('tau', 'epsilon', 'delta'):
    value = getattr(arguments, flag)
    if not 0.0 < value <= 1.0 or (value == 1.0 and flag != 'tau'):
      raise command_line.UsageError(
        f'--{flag}: expected a number between 0 and 1, got {value:g}'
      )
  out = pathlib.Path(arguments.out).absolute()
  if out.exists() and not out.is_dir():
    raise command_line.UsageError(
      f'--out: expected a directory, {arguments.out!r} is a file'
    )
  return {
    'scales': _scales(arguments.prune_scales),
    'ablation': _ablation(arguments.ablation),
  }


def _scales(text: str) -> tuple[float, ...]:
  try:
    scales = [float(part) for part in text.split(',') if part]
  except ValueError:
    scales = [-1.0]
  if not all(0.0 <= scale < 1e3 for scale in scales):
    raise command_line.UsageError(
      f'--prune_scales: expected numbers >= 0 such as {SCALES}, got {text!r}'
    )
  return tuple(sorted(set(scales)))


def _ablation(text: str) -> dict[str, str]:
  runs: dict[str, str] = {}
  for item in filter(None, text.split(',')):
    name, separator, directory = item.partition('=')
    if not (name and separator and directory) or name in runs:
      raise command_line.UsageError(
        '--ablation: expected different NAME=DIRECTORY, separated by commas, '
        f'got {item!r}'
      )
    if name in ('EAT', 'dense', 'student'):
      raise command_line.UsageError(
        f'--ablation: expected another name than {name!r}, which is taken'
      )
    runs[name] = directory
  return runs


def run(arguments: Any) -> int:
  """Runs the command with parsed arguments; returns its exit code."""
  from dataset_lib.errors import ConfigError

  try:
    options = check(arguments)
  except (command_line.UsageError, ConfigError) as error:
    command_line.fail(error)

  def command() -> int:
    # Imported once the command line is known to be right.
    from launch.eat_report import report
    from serve_lib.process import keep_freed_memory

    keep_freed_memory()
    try:
      report.report(arguments, options)
    except command_line.UsageError as error:
      command_line.fail(error)
    return command_line.OK

  return command_line.run(command)
