"""Parameters, FLOPs and throughput of AdaTape's Tables 1, 6 and 7.

  python -m benchmarks.cost --table=1 --rounds=0

printed.csv holds what the paper prints. Its GFLOPs count a multiply-add once:
half of what XLA's analysis counts, as the published code does (2023, scenic),
with norms, softmax and activations, which `model.flops` leaves out.
"""

import csv
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks import command
from benchmarks.adatape import phases
from benchmarks.timing import Candidate
from core.errors import ConfigError
from core.fields import flag
from dataset_lib.source import DatasetInfo
from launch import command_line
from launch.command_line import Count, Positive
from train_lib.task import Task, build_task

IMAGE = (224, 224, 3)
NOTE = (
  'G: a multiply-add counts once, as in the paper (GFLOPs: twice); the '
  'compiler counts the body of a loop once'
)


class Row(NamedTuple):
  """A row of a table of the paper; None where it prints no number."""

  table: int
  group: str  # the variant of its first row, the baseline
  name: str  # in the paper, as 'AdaTape-B/32-Learn'
  model: str  # arguments of the table's config
  variant: str
  throughput: float  # images per second and TPU core
  parameters: float | None  # in millions
  gflops: float | None  # multiply-adds


def _row(table: str, *cells: str) -> Row:
  numbers = [float(cell) if cell else None for cell in cells[4:]]
  values: Any = [*cells[:4], *numbers]
  return Row(int(table), *values)


with pathlib.Path(__file__).with_name('printed.csv').open() as _file:
  ROWS = [_row(*line) for line in [*csv.reader(_file)][1:]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command.Timing):
  table: tuple[Literal['1', '6', '7'], ...] | Literal['all'] = flag(
    'a list of 1, 6, 7, or all', 'all'
  )
  rows: tuple[str, ...] = flag('rows such as AdaTape-B/32-Learn', ())
  batch: Positive = flag('images per call', 8, names='--batch --batch_size')
  phases: Literal['forward', 'all'] = flag('all: also training', 'forward')
  rounds: Count = flag('timed rounds; 0 only counts', 10, names=command.ROUNDS)


def load_config(row: Row, dtype: str = 'float32') -> Any:
  """Returns the complete configuration of a row, without its data."""
  arguments, file = f'model={row.model},variant={row.variant}', 'imagenet'
  overrides = [f'dtype={dtype}']
  if row.table == 6:
    overrides.append('loss.mixup=0.0')  # needs an even number of rows
  else:
    file, arguments = 'jft', f'{arguments},data=none,fewshot=none'
  place = f'configs/adatape/{file}.py:{arguments}'
  return command_line.load_config(place, overrides)


def cases(flags: Any) -> Iterator[tuple[Any, list[Candidate]]]:
  rows = [
    r for r in ROWS if flags.table == 'all' or str(r.table) in flags.table
  ]
  legal = [row.name for row in rows]
  if unknown := set(flags.rows) - set(legal):
    raise ConfigError('rows', sorted(unknown), f'some of {", ".join(legal)}')
  asked = flags.rows or legal
  for (table, variant), group in itertools.groupby(rows, lambda row: row[:2]):
    baseline, *compared = group
    compared = [row for row in compared if row.name in asked]
    if not compared and baseline.name not in asked:
      continue
    tasks, columns = dict[str, Task](), dict[str, Any]()
    for row in (baseline, *compared):
      task = tasks[row.name] = task_of(load_config(row, flags.dtype))
      columns[row.name] = counts(task) | {
        'paper_parameters': row.parameters and row.parameters * 1e6,
        'paper_macs': row.gflops and row.gflops * 1e9,
        'paper_speedup': row.throughput / baseline.throughput,
      }
    trains = flags.phases == 'all' and flags.rounds
    for phase, prepare in phases(bool(trains)).items():
      candidates = [
        Candidate(
          name, functools.partial(prepare, task, flags.batch),
          is_baseline=name == baseline.name, flops=task.flops(),
          columns=columns[name], throughput='images_per_second',
        )
        for name, task in tasks.items()
      ]  # fmt: skip
      yield {'table': table, 'group': variant, 'phase': phase}, candidates


def task_of(config: Any) -> Task:
  data = config.dataset
  classes = data.get('num_classes', 1000)  # of ImageNet
  labels = {'max_labels': data.get('max_labels', 0)}
  info = DatasetInfo('image', IMAGE, 'uint8', classes, (), 0, **labels)
  return build_task(config, info)


def counts(task: Task) -> dict[str, Any]:
  """Returns parameters and multiply-adds of an image; computes no weights.

  'macs' is by formula; 'compiler_macs' is half of the FLOPs that XLA counts in
  the program before it is optimized, the body of a loop once.
  """
  params, state = nn.unbox(jax.eval_shape(task.init, jax.random.key(0)))
  image = jax.ShapeDtypeStruct((1, *IMAGE), jnp.float32)

  def forward(params: Any, state: Any, image: Any) -> Any:
    return task.model.apply({'params': params, **state}, image)[0]

  analysis: Any = jax.jit(forward).lower(params, state, image).cost_analysis()
  return {
    'parameters': sum(leaf.size for leaf in jax.tree.leaves(params)),
    'macs': task.flops() / 2,
    'compiler_macs': analysis['flops'] / 2,
  }


main = command.timed('cost', __doc__, Flags, cases, note=NOTE)

if __name__ == '__main__':
  raise SystemExit(main())
