"""What `launch.classify` does differently for texts and for images.

A step is a training or a measurement: the file that is there once it has ended,
and the arguments of `python`.
"""

import abc
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from core.errors import ConfigError
from launch import command_line

DENSE, ADAPTIVE, SPEED = 'dense', 'adaptive', 'speed'  # folders of a call
RESULT = 'result.json'
MINILM = 'minilm'
DEFAULT_TAU = 0.9  # timed where no threshold is certified
PIXELS, VARIANT = '64', 'Ti/16'  # of images without a checkpoint
LEAST_STEPS = 300  # of a ViT from scratch

Arguments = dict[str, str]  # of a configuration file


class Kind(abc.ABC):
  """A kind of data, and the model that is adaptive on it."""

  CONFIG: ClassVar[str]
  PLACE: ClassVar[str]  # field of the data set that names the data
  COLUMNS: ClassVar[tuple[str, ...]]  # flags and fields of the data set
  OTHERS: ClassVar[tuple[str, ...]] = ()  # flags of other kinds
  SERVE: ClassVar[str]  # the option of serving that reads the certificate
  SPENT: ClassVar[str]  # field of an answer, its computation
  UNIT: ClassVar[str]  # of it
  SHOWN: ClassVar[str]  # column of the texts or the paths of images
  IN_FULL: ClassVar[str]  # the adaptive model without its certificate
  LOSS: ClassVar[str] = 'early exits'  # what may lose accuracy

  def pretrained(self, given: str) -> str:
    """Returns the checkpoint to start from, '' for none."""
    return given

  @abc.abstractmethod
  def trainings(
    self, flags: Any, dense: pathlib.Path
  ) -> dict[str, tuple[Arguments, Sequence[str]]]:
    """Returns arguments, and overrides, of the two runs by folder."""

  @abc.abstractmethod
  def measurements(
    self, out: pathlib.Path, rows: int, tau: float
  ) -> dict[pathlib.Path, list[str]]:
    """Returns the steps after the trainings; `rows` to time may be 0."""

  def baseline(self, out: pathlib.Path, pretrained: str) -> dict[str, float]:
    """Returns the test accuracy of a simple baseline by its name, or {}."""
    return {}


class Texts(Kind):
  """Texts and an EAT, which leaves early."""

  CONFIG, PLACE = 'configs/texts.py', 'path'
  COLUMNS = 'text', 'pair', 'label', 'source', 'group'
  OTHERS = 'path', 'size'
  SERVE, SHOWN = 'tau=guaranteed', 'text'
  SPENT, UNIT = 'depth', 'layers'
  IN_FULL = 'full depth'

  def pretrained(self, given: str) -> str:
    """See `Kind`; MiniLM without another."""
    if given not in ('', MINILM):
      return given
    from model_lib import convert

    return str(convert.packaged_minilm())

  def trainings(self, flags: Any, dense: pathlib.Path) -> Any:
    """See `Kind`."""
    first = {'model': 'dense', 'pretrained': self.pretrained(flags.pretrained)}
    return {
      DENSE: (first, ()),
      ADAPTIVE: ({'model': 'eat', 'teacher': str(dense)}, ()),
    }

  def measurements(self, out: pathlib.Path, rows: int, tau: float) -> Any:
    """See `Kind`."""
    command = [
      '-m', 'benchmarks.eat', f'--workdir={out / ADAPTIVE}',
      f'--dense={out / DENSE}', '--split=test', f'--tau={tau}',
      f'--time=never,confidence={tau:g}', '--prune_scales=1', '--peers=onnx',
      f'--rows={rows}', '--warmup=8', f'--out={out / SPEED}',
    ]  # fmt: skip
    return {out / SPEED / RESULT: command} if rows else {}

  def baseline(self, out: pathlib.Path, pretrained: str) -> dict[str, float]:
    """See `Kind`."""
    from launch import text_baseline

    score = text_baseline.accuracy(str(out / DENSE), pretrained)
    return {'embeddings + logistic regression': score}


class Images(Kind):
  """Images and an AdaTape, which reads more patches of some."""

  CONFIG, PLACE = 'configs/images.py', 'root'
  COLUMNS = 'path', 'label', 'group'
  OTHERS = 'text', 'pair', 'source'
  SERVE, SHOWN = 'setting=guaranteed', 'image'
  SPENT, UNIT = 'tape_length', 'tape tokens'
  IN_FULL, LOSS = 'as trained', 'shorter tapes'

  def pretrained(self, given: str) -> str:
    """See `Kind`."""
    if given == MINILM:
      raise ConfigError('--pretrained', given, "a ViT, or '' for none")
    return given

  def trainings(self, flags: Any, dense: pathlib.Path) -> Any:
    """See `Kind`."""
    folder = pathlib.Path(flags.data).expanduser() / 'train'
    if any(path.is_dir() for path in folder.glob('*')):
      expected = 'a folder of classes, or a table: their splits are made'
      raise ConfigError('data', flags.data, expected)
    tuned, first = {'finetune': '1'}, {'model': 'vit'}
    size = {'size': str(flags.size)} if flags.size else {}
    least: tuple[str, ...] = ()
    if start := self.pretrained(flags.pretrained):
      first |= {'pretrained': start} | size | tuned
    else:
      first |= {'variant': VARIANT, 'size': PIXELS} | size
      least = (f'phases.0.least_steps={LEAST_STEPS}',)
    tape = {'model': 'input', 'pretrained': str(dense), 'certify': '1'}
    return {DENSE: (first, least), ADAPTIVE: (tape | tuned, ())}

  def measurements(self, out: pathlib.Path, rows: int, tau: float) -> Any:
    """See `Kind`."""
    (out / SPEED).mkdir(exist_ok=True)
    run, times = f'--workdir={out / ADAPTIVE}', out / SPEED / 'timings.csv'
    tapes = out / 'tapes'
    timed = {times: [
      '-m', 'benchmarks.own_images', run, f'--dense={out / DENSE}',
      f'--rows={rows}', f'--out={times}',
    ]} if rows else {}  # fmt: skip
    shown = ['-m', 'benchmarks.analyze', run, '--split=test', f'--out={tapes}']
    return timed | {tapes / 'summary.csv': shown}


KINDS: Mapping[str, Kind] = {'eat': Texts(), 'adatape': Images()}


def columns(flags: Any, kind: Kind) -> Arguments:
  """Returns the columns that flags name; ConfigError for those of others."""
  expected = f'none with --model={flags.model}'
  command_line.refuse(flags, kind.OTHERS, expected)
  return {name: getattr(flags, name) for name in kind.COLUMNS}


def arguments(values: Mapping[str, str]) -> str:
  """Returns the argument of a configuration file; ConfigError for a comma."""
  for name, value in values.items():
    if ',' in value:
      expected = 'a path or a column without commas; rename it'
      raise ConfigError(f'--{name}', value, expected)
  return ','.join(f'{name}={value}' for name, value in values.items())
