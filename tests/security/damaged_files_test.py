"""Files of runs, bundles and data that others changed: one line each."""

import json
import os

import pytest

from benchmarks import budgets
from core.errors import UserError
from dataset_lib import tokenizer
from dataset_lib.corpus import preparation
from dataset_lib.records import tfds
from eval_lib import calibration, report
from launch import evaluate
from serve_lib import bundle, classifier
from tests.security.files_test import (
  within,
  write_loop,
  write_pipe,
  write_sparse,
)
from train_lib import checkpoint_io, loading

READERS = {
  'config.json': loading.load_config,
  'dataset_info.json': loading.load_info,
  'metrics.jsonl': lambda folder: report.read_curves(folder / 'metrics.jsonl'),
  'evaluation.json':
    lambda folder: evaluate.read_rows(folder / 'evaluation.json'),
  'result.json': report.read_result,
  'sweep.csv': lambda folder: budgets._read_sweep(folder / 'sweep.csv'),
  'calibration.json': lambda folder: calibration.CalibrationFile(str(folder)),
  'certificate.json': lambda folder: classifier.CertificateFile(str(folder)),
  'checkpoints/5/manifest.json': checkpoint_io.find,
  'checkpoints/5': checkpoint_io.find,
  'checkpoints': checkpoint_io.find,
  'tokenizer.json': tokenizer.load,
  'vocab.txt': tokenizer.load,
  'spiece.model': tokenizer.load,
  'bundle': lambda folder: bundle.read(folder / 'bundle'),
  'corpus.json': lambda folder: preparation.open_split(folder, 'train'),
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
    with within(60), pytest.raises(UserError):
      print(number, READERS[name](folder))


# Legal JSON with values of other types.
OTHER = {
  'evaluation.json': (
    [{'step': 1, 'datasets': []}], [{'step': 1, 'datasets': {'a': 7}}],
    [{'step': 1, 'dev/score': 'x'}], [{'step': 1, 'dev/score': []}],
  ),
  'result.json': ({'dev/score': 'x'}, {'dev/score': {}}),
  'calibration.json': ({'dataset': []}, {'dataset': 'x'}),
  'certificate.json': (
    {'sources': {'': {'tau': 1, 'model': {}, 'drift': {}, 'dataset': []}}},
    {'sources': {'': {'tau': 1, 'model': 7, 'drift': {}}}},
  ),
  'checkpoints/5/manifest.json': tuple(
    {'step': 5, 'extra': {}, 'metrics': {}, 'best': {}, 'arrays': {},
     'files': {}} | {name: value}
    for name, values in {
      'extra': (7, []), 'metrics': ([], {'a': 'x'}), 'best': ({'metric': 1}, 7),
      'arrays': ([], {'a': 7}, {'a': ['no', []]}, {'a': ['float32', 'x']}),
      'files': ([], {'a': 7}), 'step': ('x', [], 6),
    }.items()
    for value in values
  ),
}  # fmt: skip


@pytest.mark.parametrize('name', OTHER)
def test_other_types_are_a_line(name, tmp_path):
  path = tmp_path / name
  path.parent.mkdir(parents=True, exist_ok=True)
  for content in OTHER[name]:
    text = json.dumps(content)
    if 'manifest' in name:
      text = checkpoint_io._encode(content)
    path.write_text(text)
    with pytest.raises(UserError):
      print(content, READERS[name](tmp_path))
