"""A certificate of a training of two processes."""

import json
import socket
import subprocess

import pytest

from tests.launch import toy_runs
from tests.train_lib.states import start_python

CONFIG = """
from configs.eat import glue

def get_config(arg=''):
  config = glue.get_config(arg)
  entry = dict(type='certificate', split='validation[50%:]')
  config.evals.certificate = entry
  return config
"""
QUICK = '--xla_backend_optimization_level=0'
RUN = 'import sys; from launch import train; sys.exit(train.main(sys.argv[1:]))'


@pytest.mark.nightly
def test_two_processes_of_sharded_parameters_agree(tmp_path):
  """Both take part in the checksums, also of what the first has written."""
  toy_runs.write_data(tmp_path)
  (tmp_path / 'certified.py').write_text(CONFIG)
  changes = [*toy_runs.SMALL, 'mesh.fsdp=2', 'batch_size=16']
  with socket.socket() as free:
    free.bind(('localhost', 0))
    flags = [
      f'--config={tmp_path}/certified.py:task=sst2,variant=tiny,epochs=1,'
      f'data={tmp_path},vocabulary={tmp_path}',
      *(f'--config.{change}' for change in changes),
      '--config.dataset.max_length=16', f'--workdir={tmp_path}/run',
      '--distributed', '--num_processes=2',
      f'--coordinator=localhost:{free.getsockname()[1]}',
    ]  # fmt: skip
  options = dict(flags=QUICK, stderr=subprocess.PIPE)
  both = [
    start_python(RUN, *flags, f'--process_id={n}', **options) for n in range(2)
  ]
  errors = [one.communicate(timeout=240)[1] for one in both]
  assert [one.returncode for one in both] == [0, 0], errors
  files = [
    json.loads((tmp_path / 'run' / f'{name}.json').read_text())
    for name in ('calibration', 'certificate')
  ]
  assert len({file['parameters'] for file in files}) == 1
