"""The program computes what its golden records hold."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from tests.golden import adapter, compare, record

CONFIG = 'parity adatape'


def recorded(subject):
  path = record.RECORDS / f'{subject.replace(" ", "_")}.json'
  return json.loads(path.read_text())


@pytest.mark.slow
def test_losses_of_one_config(folders, tmp_path):
  given = record.record_config(CONFIG, folders, tmp_path / 'run')
  rows = compare.compare_records(
    CONFIG.replace(' ', '_'), recorded(CONFIG), given
  )
  assert not compare.format_rows(rows)


def test_every_config_has_its_record():
  files = {path.stem for path in record.RECORDS.glob('*.json')}
  subjects = {name.replace(' ', '_') for name in adapter.configs()}
  assert subjects <= files


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
  expected = {'parameters': recorded(subject)['parameters']}
  rows = compare.compare_records(subject.replace(' ', '_'), expected, given)
  assert not compare.format_rows(rows)


def test_a_difference_is_found():
  old = {'losses': [1.0, 2.0], 'parameters': {'a': [1]}, 'page': ['x', 'y']}
  new = {'losses': [1.0, 2.1], 'parameters': {'b': [1]}, 'page': ['x', 'z']}
  rows = compare.compare_records('subject', old, new)
  assert all(row.is_different for row in rows)
  assert rows[0].difference == pytest.approx(0.05)
  assert {'parameters: a', 'parameters: b'} < {row.quantity for row in rows}
  assert not any(
    row.is_different for row in compare.compare_records('subject', old, old)
  )


@pytest.mark.nightly
def test_all_records(tmp_path):
  script = pathlib.Path(record.__file__)
  subprocess.run(
    [sys.executable, str(script), f'--out={tmp_path}'],
    check=True,
    env=os.environ | {'PYTHONPATH': '.'},
  )
  rows = compare.compare(record.RECORDS, tmp_path)
  print(compare.format_kinds(rows))
  assert not compare.format_rows(rows)
