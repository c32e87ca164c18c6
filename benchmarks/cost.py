"""Parameters, FLOPs and throughput of AdaTape's Tables 1, 6 and 7.

  python -m benchmarks.cost --table=1 --rounds=0

printed.csv holds what the paper prints. Its GFLOPs count a multiply-add once:
half of what XLA's analysis counts, as the published code does (2023, scenic),
with norms, softmax and activations, which `model.flops` leaves out.
"""

import csv
import dataclasses
import functools
import pathlib
import sys
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


class Printed(NamedTuple):
  """Numbers of a row of a table of the paper; None where it has none."""

  throughput: float  # images per second and TPU core
  parameters: float | None  # in millions
  gflops: float | None  # multiply-adds


class Row(NamedTuple):
  """A model: the arguments `model` and `variant` of its table's config."""

  model: str
  variant: str

  @property
  def name(self) -> str:
    """Its name in the paper, as 'AdaTape-B/32-Learn'."""
    return NAMES[self.model].format(self.variant)


NAMES = {
  'vit': 'ViT-{}', 'deit': 'DeiT-{}', 'plainvit': 'PlainViT-{}',
  'u2t': 'U2T-{}', 'uvit': 'UViT-{}', 'avit': 'A-ViT-{}',
  '3ffn': 'ViT-{}-3FFN', 'learn': 'AdaTape-{}-Learn',
  'input': 'AdaTape-{}-Input',
}  # fmt: skip


def _groups() -> dict[tuple[int, str], dict[Row, Printed]]:
  """Reads the rows by table and group; the first one is the baseline."""
  groups: dict[tuple[int, str], dict[Row, Printed]] = {}
  with pathlib.Path(__file__).with_name('printed.csv').open() as file:
    for line in csv.DictReader(file):
      cells = [line[name] for name in Printed._fields]
      numbers: Any = [float(cell) if cell else None for cell in cells]
      row = Row(line['model'], line['variant'])
      group = groups.setdefault((int(line['table']), line['group']), {})
      group[row] = Printed(*numbers)
  return groups


GROUPS = _groups()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command.Timing):
  table: tuple[Literal['1', '6', '7'], ...] | Literal['all'] = flag(
    'a list of 1, 6, 7, or all', 'all'
  )
  rows: tuple[str, ...] = flag('rows such as AdaTape-B/32-Learn', ())
  batch: Positive = flag('images per call', 8, names='--batch --batch_size')
  phases: Literal['forward', 'all'] = flag('all: also training', 'forward')
  rounds: Count = flag('timed rounds; 0 only counts', 10, names=command.ROUNDS)

  def config(self, table: int, row: Row) -> Any:
    model = f'model={row.model},variant={row.variant}'
    overrides = [f'dtype={self.dtype}']
    if table == 6:
      overrides.append('loss.mixup=0.0')  # needs an even number of rows
    else:
      model += ',data=none,fewshot=none'
    file = 'imagenet' if table == 6 else 'jft'
    flag = f'configs/adatape/{file}.py:{model}'
    return command_line.load_config(flag, overrides)


def cases(flags: Any) -> Iterator[tuple[Any, list[Candidate]]]:
  groups = {
    (table, name): group
    for (table, name), group in GROUPS.items()
    if flags.table == 'all' or str(table) in flags.table
  }
  legal = [row.name for group in groups.values() for row in group]
  if unknown := set(flags.rows) - set(legal):
    raise ConfigError('rows', sorted(unknown), f'some of {", ".join(legal)}')
  for (table, _), group in groups.items():
    baseline = next(iter(group))
    chosen = {r: p for r, p in group.items() if r.name in flags.rows}
    if flags.rows and not chosen:
      continue
    tasks, columns = dict[Row, Task](), dict[Row, Any]()
    for row, printed in (
      {baseline: group[baseline]} | (chosen or group)
    ).items():
      tasks[row] = task_of(flags.config(table, row))
      columns[row] = counts(tasks[row]) | {
        'paper_parameters': printed.parameters and printed.parameters * 1e6,
        'paper_macs': printed.gflops and printed.gflops * 1e9,
        'paper_speedup': printed.throughput / group[baseline].throughput,
      }
    trains = flags.phases == 'all' and flags.rounds
    for phase, prepare in phases(bool(trains)).items():
      case = {'table': table, 'group': baseline.variant, 'phase': phase}
      yield (
        case,
        [
          Candidate(
            row.name,
            functools.partial(prepare, task, flags.batch),
            is_baseline=row == baseline,
            flops=task.flops(),
            columns=columns[row],
            throughput='images_per_second',
          )
          for row, task in tasks.items()
        ],
      )


def task_of(config: Any) -> Task:
  data = config.dataset
  classes = data.get('num_classes', 1000), ()  # of ImageNet
  labels = {'max_labels': data.get('max_labels', 0)}
  info = DatasetInfo('image', IMAGE, 'uint8', *classes, 0, **labels)
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
  sys.exit(main())
