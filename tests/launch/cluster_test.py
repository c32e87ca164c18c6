"""Trainings on clusters: what is printed, handed over and refused."""

import contextlib
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest
import yaml

from launch import cluster, train
from tests import docs_test, shell
from tests.launch import resume_test

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


def job_of(text, **labels):
  """The spec of the Job of a JobSet; Kubernetes' own schema finds it legal."""
  kubernetes_validate = pytest.importorskip('kubernetes_validate')
  manifest = yaml.safe_load(text)
  # By the Go types of jobset.x-k8s.io/v1alpha2 and its webhook.
  (one,) = manifest['spec'].pop('replicatedJobs')
  assert {*one} == {'name', 'template'}
  rule = {
    'name': 'permanent', 'action': 'FailJobSet',
    'onJobFailureReasons': ['PodFailurePolicy'],
  }  # fmt: skip
  pool = 'cloud.google.com/gke-nodepool'
  place = {'alpha.jobset.sigs.k8s.io/exclusive-topology': pool}
  assert manifest == {
    'apiVersion': 'jobset.x-k8s.io/v1alpha2', 'kind': 'JobSet',
    'metadata': {'name': 'parity', 'labels': labels, 'annotations': place},
    'spec': {'failurePolicy': {'maxRestarts': 100, 'rules': [rule]}},
  }  # fmt: skip
  job = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': 'x'}}
  kubernetes_validate.validate(job | one['template'], '1.32', strict=True)
  return one['template']['spec']


def test_the_manifest_is_valid_and_has_one_pod_on_each_host(printed):
  queue = {'kueue.x-k8s.io/queue-name': 'tpus'}
  job = job_of(printed(*GKE, '--queue=tpus', '--spot'), **queue)
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
  job = job_of(printed(*GKE, *small))
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


@pytest.mark.parametrize('given', [VM, SLURM, GKE], ids=lambda given: given[0])
def test_packages_outside_the_checkout_are_found_on_all_hosts(
  given, printed, refused, tmp_path, monkeypatch
):
  monkeypatch.setattr(sys, 'path', [*sys.path])
  name = f'outside_{given[0]}'
  (tmp_path / f'{name}.py').write_text(
    'from adatape.parity import ParityModel as Model'
  )
  model = f'--config.model.name={name}:Model'
  refused(cluster.main, [*given, model, '--dry_run'], ['model.name', name])
  text = printed(*given, model, f'--package={tmp_path}')
  words = text.replace('", "', ' ')  # of GKE, a list
  assert f'env PYTHONPATH={tmp_path} python3 -m launch.train' in words


def test_a_missing_or_failed_program_is_one_line(refused, fakes, monkeypatch):
  root = fakes(kubectl='#!/bin/bash\ncat > /dev/null\nexit 3\n')
  refused(cluster.main, GKE, ['kubectl', 'exit code 3'], code=69)
  (root / 'kubectl').unlink()
  monkeypatch.setenv('PATH', str(root))
  refused(cluster.main, GKE, ['kubectl', 'PATH'], code=69)


# -- created, restarted, requeued, with fake programs

# Answers `describe` with the lines of a file, of which NONE is an error.
GCLOUD = """#!/bin/bash
root=$(dirname $0)
printf '%q ' "$@" >> $root/log; echo >> $root/log
[ $4 != describe ] || { state=$(head -1 $root/states); sed -i 1d $root/states
  [ $state != NONE ] || exit 1; echo $state; }
"""
SLEEP = '#!/bin/bash\n'


@pytest.mark.parametrize(
  ('states', 'verbs'),
  [
    ('NONE ACCEPTED PROVISIONING ACTIVE', ['create', 'ssh']),
    ('SUSPENDING SUSPENDED NONE ACTIVE', ['delete', 'create', 'ssh']),
  ],
)
def test_tpu_vms_are_created_awaited_and_all_started(states, verbs, fakes):
  root = fakes(gcloud=GCLOUD, sleep=SLEEP)
  (root / 'states').write_text(states.replace(' ', '\n'))
  assert cluster.main([*VM, '--spot']) == 0
  assert (root / 'states').read_text() == ''
  lines = (root / 'log').read_text().splitlines()
  calls = [shlex.split(line)[2:] for line in lines]
  place = ['parity', '--zone=us $west4', '--project=ours & theirs', '--quiet']
  assert all(call[2:6] == place for call in calls)
  calls = [call for call in calls if call[1] != 'describe']
  assert [call[1] for call in calls] == verbs
  assert calls[-2][6:] == [
    '--node-id=parity', '--accelerator-type=v5litepod-16',
    '--runtime-version=v2-alpha-tpuv5-lite', '--spot',
  ]  # fmt: skip
  assert (calls[-1][0], calls[-1][6]) == ('tpu-vm', '--worker=all')


def test_a_failed_resource_ends_the_wait(fakes, capfd):
  root = fakes(gcloud=GCLOUD, sleep=SLEEP)
  (root / 'states').write_text('FAILED\n')
  with pytest.raises(SystemExit, match='69'):
    cluster.main([*VM])
  assert 'parity: FAILED' in capfd.readouterr().err
  assert ' ssh ' not in (root / 'log').read_text()


# Ends with the codes of a file, one after the other.
PYTHON = """#!/bin/bash
root=$(dirname $0)
printf '%q ' "$PWD" "$@" >> $root/trained; echo >> $root/trained
code=$(head -1 $root/codes); sed -i 1d $root/codes
[ $code != wait ] || until [ -e $root/go ]; do /bin/sleep 0.05; code=0; done
exit $code
"""


@pytest.fixture
def host(fakes, monkeypatch):
  """A TPU host with a fake interpreter; returns it and the ssh command."""
  root = fakes(gcloud=GCLOUD, sleep=SLEEP, python3=PYTHON)
  (root / 'a checkout').mkdir()
  monkeypatch.setenv('HOME', str(root))
  (root / 'states').write_text('ACTIVE\n')
  assert cluster.main([*VM, f'--checkout={root}/a checkout']) == 0
  call = shlex.split((root / 'log').read_text().splitlines()[-1])
  return root, call[-1].removeprefix('--command=')


def trainings(root, count):
  """Returns the commands that a host ran, after this many and the last."""
  path, end = root / 'trained', time.time() + 60
  while not path.exists() or len(path.read_text().splitlines()) < count:
    assert time.time() < end
    time.sleep(0.02)
  lock = ['flock', str(root / 'parity.lock'), 'true']
  subprocess.run(lock, check=True, timeout=60)
  return [shlex.split(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize('last', [0, 2, 3, 4])
def test_a_tpu_host_restarts_until_the_end(host, last):
  root, remote = host
  (root / 'codes').write_text(f'75\n134\n{last}\n75\n')
  subprocess.run(['bash', '-c', remote], check=True, timeout=60)
  runs = trainings(root, 3)
  assert [directory for directory, *_ in runs] == 3 * [f'{root}/a checkout']
  for _, *words in runs:
    check_command(words)


def test_a_second_start_on_a_tpu_host_changes_nothing(host):
  root, remote = host
  (root / 'codes').write_text('wait\n')
  subprocess.run(['bash', '-c', remote], check=True, timeout=60)
  while not (root / 'trained').exists():
    time.sleep(0.02)
  again = ['bash', '-c', remote.removesuffix('&')]
  assert subprocess.run(again, timeout=60).returncode == 1
  (root / 'go').touch()
  assert len(trainings(root, 1)) == 1


def test_a_jobset_restarts_unless_the_error_would_return(printed):
  job = job_of(printed(*GKE))
  # As the controllers decide when a container ends with a code: another is a
  # BackoffLimitExceeded, and the JobSet restarts.
  assert job['backoffLimit'] == 0
  (rule,) = job['podFailurePolicy']['rules']
  assert rule['action'] == 'FailJob'
  assert rule['onExitCodes']['values'] == [2, 3, 4]


SBATCH = {
  'sbatch': '#!/bin/bash\ncat > $(dirname $0)/script\n',
  'scontrol': '#!/bin/bash\necho "$*" >> $(dirname $0)/requeued\n',
}
# As on two nodes with a process each.
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
command = sys.argv[sys.argv.index('python3'):]
tasks = []
for number in range(2):
  own = dict(SLURM_STEP_NODELIST='localhost', SLURM_NTASKS='2',
             SLURM_PROCID=str(number), SLURM_LOCALID='0')
  tasks.append(subprocess.Popen(command, env=os.environ | own))
with open(os.environ['PIDS'], 'w') as file:
  file.write(' '.join(str(task.pid) for task in tasks))
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.mark.parametrize('code', [0, 1, 75])
def test_slurm_requeues_a_stopped_training(fakes, code):
  root = fakes(**SBATCH, srun=f'#!/bin/bash\nexit {code}\n')
  workdir = root / 'a run'
  assert cluster.main(['slurm', *COMMON, f'--workdir={workdir}']) == 0
  assert (workdir / 'slurm').is_dir()
  ended = subprocess.run(
    ['bash', str(root / 'script')], env=os.environ | {'SLURM_JOB_ID': '7'}
  )
  assert ended.returncode == code
  assert (root / 'requeued').exists() == (code == 75)


def free_job():
  """Returns the number of a job whose port is free."""
  for job in range(1, 4096):
    with socket.socket() as listener:
      try:
        listener.bind(('localhost', 61440 + job))  # as JAX chooses it
      except OSError:
        continue
      return str(job)
  return pytest.skip('no free port')


@pytest.mark.nightly
def test_a_slurm_job_joins_is_requeued_and_continues(fakes, monkeypatch):
  root = fakes(**SBATCH, srun=SRUN)
  workdir, pids = root / 'run', root / 'pids'
  never = '--config.checkpoint.every_steps=0'
  given = (*resume_test.SMALL, never, '--name=parity', '--nodes=2')
  assert cluster.main(['slurm', f'--workdir={workdir}', *given]) == 0
  environment = dict(
    XLA_FLAGS='--xla_backend_optimization_level=0', PIDS=str(pids),
    SLURM_JOB_ID=(job := free_job()), SLURM_LOCALID='0',
  )  # fmt: skip
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  script = ['bash', str(root / 'script')]
  process = subprocess.Popen(script, start_new_session=True)
  try:
    resume_test.wait_for_step(workdir, 20, process)
    for pid in pids.read_text().split():  # as SLURM before the time limit
      os.kill(int(pid), signal.SIGTERM)
    assert process.wait(120) == 75
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
  assert (root / 'requeued').read_text() == f'requeue {job}\n'
  subprocess.run(script, check=True, timeout=300)
  steps = [row['step'] for row in shell.rows(workdir)]
  assert steps == list(range(1, resume_test.STEPS + 1))
  assert shell.result(workdir)['steps_this_process'] < 41
