"""Flags of `launch.benchmark`, a class for each command."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt, Interval, MinLen, Predicate

from core.fields import flag
from launch import command_line
from launch.command_line import Count, Positive, Sizes

ROUNDS = '--rounds --repeats'
LENGTHS = "length buckets of batches (default: the run's)"


def _is_writable(text: str) -> bool:
  path = pathlib.Path(text).absolute()
  can_write = path.parent.is_dir() and os.access(path.parent, os.W_OK)
  return not text or (not path.is_dir() and can_write)


def _are_runs(items: Sequence[str]) -> bool:
  pairs = [item.partition('=')[::2] for item in items]
  names = {'EAT', 'dense', 'student', *dict(pairs)}
  return all(map(all, pairs)) and len(names) == 3 + len(pairs)


Share = Annotated[float, Interval(gt=0.0, lt=1.0)]
Scale = Annotated[float, Interval(ge=0.0, lt=1e3)]
Length = Annotated[int, Interval(ge=1, le=512)]  # tokens of a BERT
Lengths = Annotated[
  tuple[Length, ...],
  Predicate(lambda sizes: sizes and list(sizes) == sorted({*sizes})),
  'an ascending list of lengths of at most 512 tokens',
]
Even = Annotated[
  int, Predicate(lambda n: n >= 0 and n % 2 == 0), 'even integer'
]
Libraries = tuple[Literal['torch', 'onnx', 'none'], ...]
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
Percents = Annotated[
  tuple[Annotated[int, Interval(ge=0, le=100)], ...],
  MinLen(1),
  'a list of integers from 0 to 100 such as 0,80',
]
Seconds = Annotated[float, Interval(gt=0, lt=1e9)]
Thresholds = Annotated[
  tuple[Annotated[float, Gt(0.0)], ...], 'a list of positive numbers like 0.5,1'
]
Shares = Annotated[
  tuple[Annotated[float, Interval(gt=0.0, le=1.0)], ...],
  MinLen(1),
  'a list of shares in (0, 1] such as 0.5,1',
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
  """Flags of all commands whose candidates take turns."""

  module: ClassVar[str]  # has the candidates
  rounds: Positive = flag('timed rounds', 10, names=ROUNDS)
  warmup: Count = flag('rounds before the timed ones', 2)
  dtype: Literal['float32', 'bfloat16'] = flag('compute dtype', 'float32')
  out: File = flag('writes the rows here, a picture beside it', '', 'FILE.csv')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adatape(Timing):
  """AdaTape against ViT, and the cost of reading the tape."""

  module = 'adatape.candidates'
  variant: str = flag('Ti, S, B or L, and pixels of a patch', 'B/16')
  batch: Positive = flag('images per call', 8, names='--batch --batch_size')
  image_size: Positive = flag('side of the square images, in pixels', 224)
  bank_size: Positive = flag('tokens in the learnable bank', 10_000)
  num_classes: Positive = flag('classes of the head', 1000)
  tape_mlp: Literal['', 'mlp', 'glu'] = flag("tape tokens' own network", '')
  phases: Literal['all', 'forward'] = flag('forward: no training steps', 'all')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost(Timing):
  """Parameters, FLOPs and throughput of AdaTape's Tables 1, 6 and 7."""

  module = 'adatape.costs'
  table: tuple[Literal['1', '6', '7'], ...] | Literal['all'] = flag(
    'a list of 1, 6, 7, or all', 'all'
  )
  rows: tuple[str, ...] = flag('rows such as AdaTape-B/32-Learn', ())
  batch: Positive = flag('images per call', 8, names='--batch --batch_size')
  phases: Literal['forward', 'all'] = flag('all: also training', 'forward')
  rounds: Count = flag('timed rounds; 0 only counts', 10, names=ROUNDS)

  def config(self, table: int, row: Any) -> Any:
    """Returns the complete configuration of a row, without its data."""
    model = f'model={row.model},variant={row.variant}'
    overrides = [f'dtype={self.dtype}']
    if table == 6:
      overrides.append('loss.mixup=0.0')  # needs an even number of rows
    else:
      model += ',data=none,fewshot=none'
    file = f'configs/adatape/table{table}.py:{model}'
    return command_line.load_config(file, overrides)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Albert(Timing):
  """ALBERT whose tokens halt, against fixed depth."""

  module = 'albert_act.candidates'
  variant: str = flag('micro, mini, tiny, small or base', 'small')
  length: Length = flag('tokens of a row', 128)
  batch: Sizes = flag('rows at a time', (1, 8))
  shares: tuple[Share, ...] = flag('mean over most iterations', (0.42, 0.25))
  iterations: Positive = flag('iterations of a stage of the engine', 12)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EatSpeed(Timing):
  """EAT in the engine, against dense BERTs of three libraries."""

  module = 'eat.candidates'
  variant: str = flag('BERT: tiny, mini, small, medium, base, ...', 'base')
  depth: Count = flag("layers, even, 6 or more; 0 for the variant's", 0)
  length: Lengths = flag('tokens of every row, ascending', (128,))
  batch: Sizes = flag('rows of a batch; 1: one request at a time', (1, 16, 32))
  exit_rates: Percents = flag('percent of exits at layer 4', (0, 50, 80, 95))
  window: Even = flag("tokens of EAT's attention window, even; 0: none", 0)
  candidates: Groups = flag(
    'candidates to time; dense is required',
    ('dense', 'eat', 'torch', 'onnx'),
    names='--candidates --contenders',
  )
  min_seconds: Seconds = flag('least seconds of a candidate per round', 0.5)
  fill: Positive = flag('least full batches per call of the engine', 8)
  rounds: Positive = flag('timed rounds', 7, names=ROUNDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eat(command_line.RunFlags):
  """Quality and speed of a trained EAT, from its checkpoint."""

  module = 'launch.eat_report'
  dense: str = flag('a dense run on the same data', '')
  student: str = flag('a run of a smaller dense model', '')
  ablation: Runs = flag('runs for the ablation', (), 'NAME=DIRECTORY,...')
  out: str = flag('where to write', metavar='DIRECTORY')
  split: str = flag("split; default: that of the run's evaluation dev", '')
  limit: Count = flag('number of first rows of the split; 0 for all', 0)
  prune_scales: tuple[Scale, ...] = flag('prune-ratio factors', (0.0, 0.5, 1.0))
  tau: Share = flag('confidence threshold of the default setting', 0.9)
  rules: tuple[str, ...] = flag('exit rules of yours to sweep too', (), 'NAME')
  time: str = flag(
    'auto (never, the default and the frontier), all, none, or names such as '
    'confidence=0.9,prune_0.5/never',
    'auto',
  )
  rows: Positive = flag('number of rows to time, at most', 1000)
  warmup: Count = flag('calls of each setting before the timed ones', 50)
  rounds: Positive = flag('timed rounds', 3, names=ROUNDS)
  batch_size: Positive = flag('rows of a full batch', 32)
  lengths: Sizes | None = flag(LENGTHS, None, 'TOKENS,...')
  guarantee: bool = flag('resample rows: how often does the bound fail?', False)
  epsilon: Share = flag('bound on the risk', 0.02)
  delta: Share = flag('largest probability that the bound fails', 0.1)
  draws: Positive = flag('number of resamplings', 200)
  peers: Libraries = flag(
    'installed libraries that also run the dense run and the student; or none',
    ('torch', 'onnx'),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptivity(command_line.RunFlags):
  """What a run of any family spends on rows, against their difficulty."""

  module = 'launch.adaptivity'
  dense: str = flag('run whose entropy is the difficulty', '', 'DIRECTORY')
  out: str = flag('where to write', metavar='DIRECTORY')
  split: str = flag("split; default: that of the run's evaluation", '')
  rows: Positive = flag('most rows, spread evenly over the split', 2000)
  tau: Share = flag('confidence threshold of a model with several heads', 0.9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve:
  """A trained EAT and dense models under load as it comes."""

  module = 'launch.load_report'
  workdir: str = flag('a run of an EAT', metavar='DIRECTORY')
  dense: str = flag('a dense run on the same data', metavar='DIRECTORY')
  out: File = flag('writes the rows here, a picture beside it', '', 'FILE.csv')
  split: str = flag("split; default: that of the run's evaluation dev", '')
  rows: Positive = flag('first rows of the split to send, in turn', 1000)
  tau: Share = flag('confidence threshold of the EAT', 0.9)
  batch_size: Positive = flag('rows of a full batch', 32)
  lengths: Sizes | None = flag(LENGTHS, None, 'TOKENS,...')
  loads: Sizes = flag('% of capacity', (10, 30, 50, 70, 80, 90, 100, 110, 120))
  seconds: Seconds = flag('of each measurement', 10.0)
  deadline_ms: Seconds = flag('of the goodput', 200.0, 'MILLISECONDS')
  peers: Libraries = flag('libraries that run the dense run', ('torch', 'onnx'))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budgets(command_line.RunFlags):
  """A trained AdaTape with other settings of the reading."""

  module = 'adatape.budgets'
  dense: str = flag('a run without a tape on the same data', '', 'DIRECTORY')
  sweep: str = flag('a sweep whose runs stand beside it', '', 'DIRECTORY')
  names: command_line.Names = flag('other names to show', '', 'GIVEN=SHOWN;...')
  out: str = flag('default: budgets/ in the workdir', '', 'DIRECTORY')
  split: str = flag("split; default: that of the run's evaluation", '')
  rows: Positive = flag('most rows, spread evenly over the split', 2000)
  thresholds: Thresholds = flag('halting thresholds; default: own', ())
  max_steps: Sizes = flag('most tape tokens T; default: own', ())
  bank_shares: Shares = flag('shares of the bank kept, the most read', (1.0,))
  batch_size: Positive = flag('rows of a full batch', 32)
  rounds: Count = flag('timed rounds; 0: no timing', 5, names=ROUNDS)
  warmup: Count = flag('rounds before the timed ones', 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input(Timing):
  """Reading and cropping JPEG files, against tf.data and PyTorch."""

  module = 'eval_lib.input_candidates'
  root: str = flag('folder with train/CLASS/*.jpg', metavar='DIRECTORY')
  image_size: Positive = flag('side of the crops, in pixels', 224)
  images: Annotated[int, Interval(ge=64)] = flag('images of a call', 2048)
  rounds: Positive = flag('timed rounds', 5, names=ROUNDS)


FLAGS = dict(
  adatape=Adatape, cost=Cost, budgets=Budgets, albert=Albert,
  eat_speed=EatSpeed, eat=Eat, input=Input, serve=Serve, adaptivity=Adaptivity,
)  # fmt: skip
