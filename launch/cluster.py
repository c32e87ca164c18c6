"""Starts a training on Cloud TPU VMs, on GKE or with SLURM.

  python -m launch.cluster slurm --name=parity --nodes=2 --dry_run \\
      --config=configs/adatape/parity.py --workdir=/shared/parity

launch.train reads --config, --config.KEY and --workdir, which all hosts mount.
The mesh and the batch size are checked for the devices before anything is
submitted; --dry_run prints what would be. A training that is stopped (SIGTERM)
saves its step and is restarted. docs/clusters.md has examples.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
import shlex
import string
import subprocess
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from annotated_types import Predicate

from core.errors import ConfigError, UserError
from core.fields import flag
from launch import command_line
from launch.command_line import PREEMPTED, Count, Positive

TEMPLATES = pathlib.Path(__file__).parent / 'templates'
SAVE_SECONDS = 120  # from SIGTERM to SIGKILL
# A restart ends in the same way: see command_line.EXIT_CODES.
PERMANENT = [command_line.USAGE, command_line.NOT_FINITE, command_line.DATA]
# Names of gcloud, of a VM's image and of a GKE node; cores of a chip.
TPUS = {
  'v4': ('v4', 'tpu-ubuntu2204-base', 'tpu-v4-podslice', 2),
  'v5e': ('v5litepod', 'v2-alpha-tpuv5-lite', 'tpu-v5-lite-podslice', 1),
  'v5p': ('v5p', 'v2-alpha-tpuv5', 'tpu-v5p-slice', 2),
  'v6e': ('v6e', 'v2-alpha-tpuv6e', 'tpu-v6e-slice', 1),
}
# gcloud takes a number of cores, which has one shape; by cores of a chip.
SHAPES = {
  1: '1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16',
  2: '2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16',
}
SLICES = {f'{t}:{shape}' for t in TPUS for shape in SHAPES[TPUS[t][3]].split()}
Slice = Annotated[
  str,
  Predicate(SLICES.__contains__),
  f'one of {", ".join(TPUS)} with its shape, such as v5e:4x4 or v4:2x2x2',
]
Name = Annotated[  # GKE appends the numbers of the job and of the pod
  str,
  Predicate(lambda s: re.fullmatch('[a-z]([-a-z0-9]{0,38}[a-z0-9])?', s)),
  'at most 40 lower-case letters, digits and -, the first a letter',
]
Text = Annotated[
  str, Predicate(lambda s: s and s.isprintable()), 'a line that is not empty'
]
Directory = Annotated[
  str,
  Predicate(lambda p: re.fullmatch('/.*', p) and '..' not in p.split('/')),
  "an absolute path without '..'; mount a bucket to use it",
]


class UnavailableError(UserError, RuntimeError):
  """The program that submits is missing or failed."""

  exit_code = command_line.UNAVAILABLE


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Training:
  program: ClassVar[tuple[str, ...]]  # reads the filled template on stdin
  template: ClassVar[str]

  config: str = flag('the experiment', metavar='FILE.py[:argument]')
  overrides: tuple[str, ...] = command_line.overrides_flag()
  workdir: Directory = flag('directory of the run on all hosts', metavar='PATH')
  name: Name = flag('name of the job')
  python: Text = flag('the interpreter on the hosts', 'python3', 'PATH')
  package: Directory | None = flag(
    'folder of your own packages, here and on all hosts', None, 'PATH'
  )
  dry_run: bool = flag('print what would run, run nothing', False)

  def command(self, is_distributed: bool = True) -> list[str]:
    """Returns the command of one process."""
    training = command_line.training(self.config, self.workdir, self.overrides)
    env = ['env', f'PYTHONPATH={self.package}'] if self.package else []
    return [*env, self.python, *training, *['--distributed'] * is_distributed]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TpuTraining(_Training):
  topology: Slice = flag('generation and chips', metavar='v5e:4x4')
  spot: bool = flag('use spot capacity', False)

  def devices(self) -> int:
    """Returns the number of chips, each of which is a device of JAX."""
    return math.prod(map(int, self.topology.split(':')[1].split('x')))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuVm(_TpuTraining):
  """Cloud TPU VMs, by queued resources."""

  program, template = ('bash',), 'tpu_vm.sh'

  zone: Text = flag('zone of Google Cloud')
  project: Text | None = flag("default: gcloud's own", None)
  checkout: Text = flag('its place on the hosts', 'adaptive-computation')

  def values(self) -> Mapping[str, object]:
    """Returns values of a script that creates, waits, starts on all hosts."""
    name, runtime, _, cores = TPUS[self.topology.split(':')[0]]
    kind = f'--accelerator-type={name}-{self.devices() * cores}'
    kind += f' --runtime-version={runtime}' + ' --spot' * self.spot
    place = [f'--zone={self.zone}']
    place += [f'--project={self.project}'] if self.project else []
    # A lost ssh connection does not end it; a second start changes nothing.
    train = f'JAX_PLATFORMS=tpu,cpu {shlex.join(self.command())}'
    ends = '|'.join(map(str, PERMANENT))
    loop = f'until {train}; do case $? in {ends}) exit ;; esac; sleep 10; done'
    remote = f'cd {shlex.quote(self.checkout)} || exit; '
    remote += f'nohup flock -n ~/{self.name}.lock bash -c {shlex.quote(loop)}'
    remote += f' >> ~/{self.name}.log 2>&1 < /dev/null &'
    return dict(
      name=self.name, place=shlex.join(place), kind=kind,
      remote=shlex.quote(remote),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gke(_TpuTraining):
  """A JobSet of TPU hosts on GKE, with a queue of Kueue if one is named."""

  program, template = ('kubectl', 'apply', '-f', '-'), 'gke.yaml'

  image: Text = flag('container image; its working directory is the checkout')
  claim: Text = flag('PersistentVolumeClaim that holds the runs')
  mount: Directory = flag('where the claim is mounted', '/mnt/runs', 'PATH')
  queue: Text | None = flag('local queue of Kueue', None)
  chips_per_host: Positive = flag('chips of a node of the pool', 4)

  def values(self) -> Mapping[str, object]:
    """Returns values of the template, as JSON: YAML that needs no quotes."""
    hosts, rest = divmod(self.devices(), self.chips_per_host)
    if rest:
      expected = f'a divisor of the {self.devices()} chips of {self.topology}'
      raise ConfigError('--chips_per_host', self.chips_per_host, expected)
    if not self.workdir.startswith(f'{self.mount.rstrip("/")}/'):
      expected = f'a directory below --mount={self.mount}'
      raise ConfigError('--workdir', self.workdir, expected)
    name, _, chips = self.topology.partition(':')
    gke, node = 'cloud.google.com/gke', TPUS[name][2]
    nodes = {f'{gke}-tpu-accelerator': node, f'{gke}-tpu-topology': chips}
    nodes |= {f'{gke}-spot': 'true'} if self.spot else {}
    values = dataclasses.asdict(self) | dict(
      hosts=hosts, command=self.command(hosts > 1), codes=PERMANENT,
      labels={'kueue.x-k8s.io/queue-name': self.queue} if self.queue else {},
      nodes=nodes, seconds=SAVE_SECONDS,
      taints=[{'key': f'{gke}-spot', 'operator': 'Exists'}] * self.spot,
    )  # fmt: skip
    return {k: json.dumps(v, ensure_ascii=False) for k, v in values.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm(_Training):
  """SLURM, by a script for sbatch."""

  program, template = ('sbatch',), 'slurm.sh'

  nodes: Positive = flag('number of nodes', 1)
  gpus_per_node: Count = flag('GPUs of a node, one process each; 0: CPU', 0)
  minutes: Positive = flag('time limit, after which it is requeued', 1440)
  sbatch: Text = flag('more options', 'open-mode=append', 'KEY=VALUE,...')

  def devices(self) -> int:
    """Returns the number of processes: JAX gives each of them one device."""
    return self.nodes * max(1, self.gpus_per_node)

  def values(self) -> Mapping[str, object]:
    """Returns the values of the template."""
    logs, gpus = f'{self.workdir}/slurm', self.gpus_per_node
    options = {
      'job-name': self.name, 'time': self.minutes, 'nodes': self.nodes,
      'ntasks-per-node': max(1, gpus), 'open-mode': 'append',
      'output': f'{logs}/%j.out', 'error': f'{logs}/%j.err',
    }  # fmt: skip
    options |= {'gpus-per-node': gpus} if gpus else {}
    options |= command_line.parse_fields('--sbatch', self.sbatch)
    lines = (
      f'#SBATCH --{name.replace("_", "-")}={shlex.quote(str(value))}'
      for name, value in options.items()
    )
    return dict(
      options='\n'.join(lines), logs=shlex.quote(logs), seconds=SAVE_SECONDS,
      command=shlex.join(self.command(self.devices() > 1)),
      preempted=PREEMPTED,
    )  # fmt: skip


def run(flags: Any) -> None:
  """Checks a training for its devices, then prints or submits it."""
  if flags.package:
    sys.path.append(flags.package)
  config = command_line.load_config(flags.config, flags.overrides)
  from jax.sharding import AbstractMesh

  from train_lib import sharding

  shape = sharding.mesh_shape(config.mesh, flags.devices(), is_whole=True)
  sharding.check_batch_size(config, AbstractMesh(shape, sharding.AXES))
  template, program = (TEMPLATES / flags.template).read_text(), flags.program
  text = string.Template(template).substitute(flags.values())
  try:
    if flags.dry_run:
      print(text, end='')
      print(f'not run: {shlex.join(program)}', file=sys.stderr)
      return
    if isinstance(flags, Slurm):  # without their folder there are no logs
      command_line.check_place('--workdir', flags.workdir)
      os.makedirs(f'{flags.workdir}/slurm', exist_ok=True)
    code = subprocess.run(program, input=text, text=True).returncode
  except OSError as error:
    raise UnavailableError(f'{program[0]!r} is not on PATH: {error}') from error
  if code:
    raise UnavailableError(f'{program[0]} ended with exit code {code}')


FLAGS = dict(tpu_vm=TpuVm, gke=Gke, slurm=Slurm)
main = command_line.Command('cluster', __doc__, FLAGS, run)

if __name__ == '__main__':
  sys.exit(main())
