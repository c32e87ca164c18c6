"""Trainings on clusters: what is printed, handed over and refused."""

import pathlib
import shlex

import pytest
import yaml

from launch import cluster, train
from tests import docs_test
from tests.launch.jobsets import validate

PAGE = pathlib.Path(__file__).resolve().parents[2] / 'docs/clusters.md'
CONFIG = '--config=configs/adatape/parity.py:n=8'
COMMON = (CONFIG, '--name=parity', '--config.optimizer.lr=1e-3')
WORKDIR = "/mnt/runs/our 'first' $run"
RUN = f'--workdir={WORKDIR}'
POD = ('--topology=v5e:4x4', RUN)
GKE = ('gke', *COMMON, *POD, '--image=registry/us:1', '--claim=runs')
VM = ('tpu_vm', *COMMON, *POD, '--zone=us $west4', '--project=ours & theirs')
SLURM = ('slurm', *COMMON, RUN)


def check_command(words, is_distributed=True):
  """Asserts that words are the training which was asked for."""
  at = words.index('launch.train')
  flags = train.main.parse(words[at + 1 :])
  assert f'--config={flags.config}' == CONFIG
  assert flags.overrides == ('optimizer.lr=1e-3',)
  assert flags.workdir == WORKDIR
  assert flags.distributed is is_distributed


def test_the_manifest_is_valid_and_has_one_pod_on_each_host(printed):
  manifest = yaml.safe_load(printed(*GKE, '--queue=tpus', '--spot'))
  job = validate(manifest)
  assert manifest['metadata']['labels'] == {'kueue.x-k8s.io/queue-name': 'tpus'}
  assert job['parallelism'] == job['completions'] == 4
  pod = job['template']['spec']
  assert pod['nodeSelector'] == {
    'cloud.google.com/gke-tpu-accelerator': 'tpu-v5-lite-podslice',
    'cloud.google.com/gke-tpu-topology': '4x4',
    'cloud.google.com/gke-spot': 'true',
  }
  (container,) = pod['containers']
  assert container['resources'] == {'limits': {'google.com/tpu': 4}}
  check_command(container['command'])


def test_one_host_joins_no_others(printed):
  small = ('--topology=v6e:2x4', '--chips_per_host=8')
  job = validate(yaml.safe_load(printed(*GKE, *small)))
  assert job['parallelism'] == 1
  (container,) = job['template']['spec']['containers']
  check_command(container['command'], is_distributed=False)


def test_kubectl_receives_what_is_printed(printed, fakes):
  fakes(kubectl='#!/bin/bash\ncat > $(dirname $0)/got\necho "$@" >> $0.log\n')
  text = printed(*GKE)
  root = fakes()
  assert cluster.main([*GKE]) == 0
  assert (root / 'got').read_text() == text
  assert (root / 'kubectl.log').read_text() == 'apply -f -\n'


def test_three_dimensional_slices_are_counted_in_cores(printed):
  text = printed(*VM, '--topology=v5p:2x2x4')
  assert '--accelerator-type=v5p-32 --runtime-version=v2-alpha-tpuv5\n' in (
    text.replace(' ;;', '')
  )


def test_the_script_for_sbatch_has_a_process_for_each_gpu(printed):
  more = '--sbatch=account=us,mem=64GB,partition=big'
  lines = printed(*SLURM, '--nodes=2', '--gpus_per_node=4', more).splitlines()
  options = {line[8:] for line in lines if line.startswith('#SBATCH ')}
  assert options >= {
    '--nodes=2', '--gpus-per-node=4', '--ntasks-per-node=4', '--requeue',
    '--signal=TERM@120', '--account=us', '--mem=64GB', '--partition=big',
    f'--output={shlex.quote(f"{WORKDIR}/slurm/%j.out")}',
  }  # fmt: skip
  (command,) = [line for line in lines if line.startswith('srun ')]
  check_command(shlex.split(command))


@pytest.mark.parametrize('kind', ['tpu_vm', 'gke', 'slurm'])
def test_the_page_shows_what_its_commands_print(printed, kind):
  page = PAGE.read_text()
  (command,) = [c for c in docs_test.commands(page) if f'cluster {kind}' in c]
  text = printed(*shlex.split(command)[3:])
  assert f'```\n{text}```\n' in page


def test_a_missing_or_failed_program_is_one_line(refused, fakes, monkeypatch):
  root = fakes(kubectl='#!/bin/bash\ncat > /dev/null\nexit 3\n')
  refused(cluster.main, GKE, ['kubectl', 'exit code 3'], code=69)
  (root / 'kubectl').unlink()
  monkeypatch.setenv('PATH', str(root))
  refused(cluster.main, GKE, ['kubectl', 'PATH'], code=69)
