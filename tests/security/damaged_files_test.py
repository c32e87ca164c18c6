"""Files of runs, bundles and data that others changed: one line each."""

import os
import types

import pytest

from dataset_lib import corpus, tfds, tokenizer
from eval_lib import calibration, certificate, report
from launch import evaluate, sweep_runs
from serve_lib import bundle
from tests.security.files_test import (
  within,
  write_loop,
  write_pipe,
  write_sparse,
)
from train_lib import checkpoint_io, loading


def read_result(folder):
  run = types.SimpleNamespace(workdir=folder)
  return sweep_runs.Run.result(run)


READERS = {
  'config.json': loading.load_config,
  'dataset_info.json': loading.load_info,
  'metrics.jsonl': lambda folder: report.read_curves(folder / 'metrics.jsonl'),
  'evaluation.json':
    lambda folder: evaluate.read_rows(folder / 'evaluation.json'),
  'result.json': read_result,
  'calibration.json': lambda folder: calibration.CalibrationFile(str(folder)),
  'certificate.json': lambda folder: certificate.CertificateFile(str(folder)),
  'checkpoints/5/manifest.json': checkpoint_io.find,
  'checkpoints/5': checkpoint_io.find,
  'checkpoints': checkpoint_io.find,
  'tokenizer.json': tokenizer.load,
  'vocab.txt': tokenizer.load,
  'spiece.model': tokenizer.load,
  'bundle': lambda folder: bundle.read(folder / 'bundle'),
  'corpus.json': lambda folder: corpus.open_split(folder, 'train'),
  'features.json':
    lambda folder: tfds._refuse_foreign_code(folder / 'features.json'),
}  # fmt: skip
CONTENTS = (
  b'', b'\0\1{', b'\xff\xfe{"a":1}', b'[]', b'[[1], 2]', b'7', b'null', b'"x"',
  b'[' * 10**6, b'{"a":' * 200 + b'1' + b'}' * 200, b'{"step": ' + b'1' * 400,
  b'{"step": ' + b'1' * 400 + b'}', b'[' + b'1' * 5000 + b']', b'{"a": 1e999}',
)  # fmt: skip
SPECIAL = (
  os.mkdir, write_pipe, write_loop, write_sparse,
  lambda path: path.symlink_to('/dev/zero'),
)  # fmt: skip


def cases(name):
  yield from SPECIAL
  for content in CONTENTS:
    content += b'\n' * (name == 'metrics.jsonl')
    yield lambda path, content=content: path.write_bytes(content)


@pytest.mark.parametrize('name', READERS)
def test_a_damaged_file_is_a_line(name, tmp_path):
  legal = {'metrics.jsonl': (b'',), 'evaluation.json': (b'[]',)}.get(name, ())
  if name == 'features.json':  # TFDS refuses other JSON
    legal = b'[]', b'[[1], 2]', b'7', b'null', b'"x"'
  for number, make in enumerate(cases(name)):
    folder = tmp_path / str(number)
    path = folder / name
    path.parent.mkdir(parents=True)
    make(path)
    if len(SPECIAL) <= number and path.read_bytes().strip() in legal:
      continue
    # What `launch.command_line` prints as one line.
    with within(60), pytest.raises(Exception) as error:
      print(number, READERS[name](folder))
    assert hasattr(error.value, 'exit_code'), (number, repr(error.value))
