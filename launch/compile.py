"""Compiles the train step for a TPU, without one, and reports its costs.

  python -m launch.compile --topology=v5e:4x4 \\
      --config=configs/adatape/jft.py:data=none,fewshot=none,model=learn

Needs the extra [tpu], no TPU and no data: shapes follow from the configuration,
and from --classes and --examples where only the data know. Every field of the
configuration can be overridden, e.g. --config.mesh.fsdp=4. Prints memory and
FLOPs of a chip, and the collectives of a step by kind and by the line that
causes them. Exit code 7: the step does not fit into the memory of a chip.

Topologies: v4, v5e, v5p or v6e, a colon, and the chips along each axis, as
v5e:16x16 or v4:4x4x4.
"""

import dataclasses
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

from annotated_types import Predicate

from core.errors import ConfigError
from core.fields import flag
from launch import command_line
from launch.command_line import Positive

# GiB of memory of a chip, of which XLA reserves a part.
MEMORY = {'v4': 32.0, 'v5e': 16.0, 'v5p': 95.0, 'v6e': 32.0}
_TOPOLOGY = re.compile(rf'({"|".join(MEMORY)}):\d+(x\d+){{1,2}}')
Topology = Annotated[
  str, Predicate(_TOPOLOGY.fullmatch), 'a topology such as v5e:4x4 or v4:4x4x4'
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  """Flags of a compilation."""

  config: str = flag('the experiment', metavar='FILE.py[:argument]')
  overrides: tuple[str, ...] = command_line.overrides_flag()
  topology: Topology = flag('kind of TPU and its chips', 'v5e:4x4', 'KIND:AxB')
  classes: Positive = flag('classes of a folder or of TFDS', 1000)
  examples: Positive = flag('records of the training split', 1_281_167)
  rows: Positive = flag('lines that are listed', 12)


def run(flags: Flags) -> None:
  """Compiles the step of each phase; prints tables."""
  # Before jax is imported, which a configuration may do.
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  config = command_line.load_config(flags.config, flags.overrides)
  plan, rows = plan_of(config, flags)
  kind, shape = flags.topology, dict(plan.mesh.shape)
  print(f'{kind}: {plan.mesh.size} chips as {shape}')
  if plan.not_split:
    print(f'warning: not split, as they do not divide: {plan.not_split}')
  try:
    for phase, *result in steps(plan, rows):
      report(flags, plan, phase, *result)
  except (RuntimeError, ValueError) as error:  # of XLA: how much is used
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    _refuse(flags, plan, sizes(str(error)))


def plan_of(config: Any, flags: Flags) -> tuple[Any, Any]:
  """Returns a run's plan for a topology, and shapes of a row of a batch."""
  from dataset_lib.builder import sketch
  from train_lib.build import Plan

  info, rows = sketch(
    config.dataset, config.train_split, flags.classes, flags.examples
  )
  per_epoch = max(1, flags.examples // config.batch_size)
  devices = devices_of(flags.topology)
  return Plan(config, info, per_epoch, devices), rows


def steps(plan: Any, rows: Any) -> Iterator[tuple[Any, ...]]:
  """Yields phase, program, seconds and seconds of CPU of steps that differ."""
  import jax

  from train_lib import compiled

  for phase in plan.phases:
    before = time.process_time()
    with jax.set_mesh(plan.mesh):
      program, seconds = plan.step(phase, plan.batch_shapes(rows))
    if seconds:  # it is not that of an earlier phase
      spent = time.process_time() - before
      yield phase.label, compiled.inspect(program), seconds, spent


def devices_of(topology: str) -> Any:
  """Returns the chips of a topology; ConfigError if there is none such."""
  # Of a TPU machine; without them libtpu asks the network for its name.
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', 'true')
  os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v5litepod-8')
  os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', 'true')
  from jax.experimental import topologies

  options = {}
  if topology.startswith(('v4', 'v5p')):  # two cores are one device
    options['chip_config_name'] = 'megacore'
  try:
    description = topologies.get_topology_desc(topology, 'tpu', **options)
  except Exception as error:  # of libtpu, of several kinds
    expected = "a topology of libtpu, with pip install -e '.[tpu]'"
    expected += f' ({error})'
    raise ConfigError('--topology', topology, expected) from error
  return description.devices


def report(
  flags: Flags, plan: Any, phase: str, program: Any, seconds: float, cpu: float
) -> None:
  """Prints memory, FLOPs and collectives of a chip."""
  from eval_lib.report import print_table

  limit = MEMORY[flags.topology.partition(':')[0]]
  used = (program.arguments + program.temporary) / 2**30
  formula = 3 * plan.task.flops() * plan.config.batch_size / plan.mesh.size
  values = {
    'state and batch, GiB': program.arguments / 2**30,
    'temporary, GiB': program.temporary / 2**30,
    f'memory, of {limit:g} GiB': used,
    'TFLOP by formula': formula / 1e12,
    'TFLOP by compiler, loops once': program.flops / 1e12,
    'compiling, s': seconds,
    'compiling, s of processor time': cpu,
  }
  print_table(f'{phase}: one step of one chip', [
    {'quantity': name, 'value': f'{value:.4g}'}
    for name, value in values.items()
  ])  # fmt: skip
  for key, title in (('kind', 'collectives'), ('where', 'their lines')):
    rows = [
      {key: name, 'count': count, 'MB': f'{size / 1e6:.4g}'}
      for name, (count, size) in program.traffic(key).items()
    ]
    if rows:
      print_table(title, rows[: flags.rows])
  if used > limit:
    _refuse(flags, plan, f'{used:.1f}G of {limit:g}G')


def sizes(error: str) -> str:
  """Returns 'needed of available' from an error of XLA, else its beginning."""
  numbers = re.findall(r'\d[\d.]*[KMGT]\b', error)
  return ' of '.join(numbers[:2]) if numbers[1:] else error[:200]


def _refuse(flags: Flags, plan: Any, memory: str) -> None:
  """Exits, and says what needs less memory."""
  changes = ', '.join(f'--config.{change}' for change in advice(plan))
  command_line.fail(
    f'{flags.topology}: the step needs {memory} of a chip; try '
    f'{changes or "a topology of more chips"}',
    command_line.MEMORY,
  )


def advice(plan: Any) -> list[str]:
  """Returns legal overrides that need less memory, the cheapest first."""
  config, shape = plan.config, plan.mesh.shape
  scan, remat = config.blocks.scan, config.blocks.remat
  changes = ['blocks.scan=False'] if scan else []
  if remat != 'full':
    changes.append(f'blocks.remat={"full" if remat == "dots" else "dots"}')
  devices = shape['data'] * shape['fsdp']
  if shape['data'] > 1:
    changes.append(f'mesh.data=1 --config.mesh.fsdp={devices}')
  multiple = 2 * devices * config.num_micro * plan.task.rows_together
  if config.batch_size % multiple == 0:
    changes.append(f'num_micro={2 * config.num_micro}')
    changes.append(f'batch_size={config.batch_size // 2}')
  return changes


main = command_line.Command('compile', __doc__, Flags, run)

if __name__ == '__main__':
  sys.exit(main())
