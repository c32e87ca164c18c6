"""The program computes what its golden records hold."""

import json
import os
import subprocess
import sys

import jax
import pytest

from tests.golden import adapter, compare, record

CONFIG = 'parity adatape'


def differences(subject, given, *kinds):
  """What differs from the record; `kinds`: of these alone."""
  path = record.RECORDS / f'{subject.replace(" ", "_")}.json'
  old = json.loads(path.read_text())
  old = {kind: old[kind] for kind in kinds or old}
  return compare.unexplained(compare.differences(old, given))


@pytest.mark.slow
def test_losses_of_one_config(folders, tmp_path):
  given = record.record_config(CONFIG, folders, tmp_path / 'run')
  assert not differences(CONFIG, given)


def test_every_config_has_its_record():
  files = {path.stem for path in record.RECORDS.glob('*.json')}
  assert {name.replace(' ', '_') for name in adapter.configs()} <= files


@pytest.mark.parametrize(
  'subject',
  [
    'parity ut', 'digits input', 'digits vit', 'recurrent addition',
    'eat sst2', 'albert mnli', 'albert pretrain act',
  ],
)  # fmt: skip
def test_parameters_of_each_family(subject, folders):
  config = adapter.load(*adapter.configs()[subject], folders)
  task, _ = adapter.first_batch(config)
  params, _ = jax.eval_shape(lambda: adapter.initial_parameters(task))
  given = {'parameters': adapter.parameter_shapes(params)}
  assert not differences(subject, given, 'parameters')


def test_a_difference_is_found():
  old = {'losses': [1.0, 2.0], 'parameters': {'a': [1]}, 'page': ['x', 'y']}
  new = {'losses': [1.0, 2.1], 'parameters': {'b': [1]}, 'page': ['x', 'z']}
  found = compare.differences(old, new)
  names = 'losses', 'parameters: a', 'parameters: b', 'page'
  assert {*compare.unexplained(found)} == {*names}
  assert found['losses'] == pytest.approx(0.05)
  assert not compare.unexplained(compare.differences(old, old))


@pytest.mark.nightly
def test_all_records(tmp_path):
  command = [sys.executable, record.__file__, f'--out={tmp_path}']
  subprocess.run(command, check=True, env=os.environ | {'PYTHONPATH': '.'})
  assert compare.main(record.RECORDS, tmp_path) == 0
