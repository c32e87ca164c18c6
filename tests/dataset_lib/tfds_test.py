"""TFDS directories in both formats, written here, read without TensorFlow."""

import json
import os
import shutil
import subprocess
import sys

import cv2
import numpy as np
import pytest

from dataset_lib import builder
from dataset_lib.errors import (
  ConfigError,
  InvalidDataError,
  MissingDataError,
  TooManyBadRecordsError,
)
from tests.dataset_lib import tfds_marks

FORMATS = ('array_record', 'tfrecord')
NAMES = ('ant', 'bee', 'cat')

pytestmark = tfds_marks.MARKS


@pytest.fixture(scope='module')
def prepared(tfds_data):
  """{file format: data_dir} of a set 'tiny' of constant images."""
  return {file_format: tfds_data / file_format for file_format in FORMATS}


@pytest.fixture
def copy(prepared, tmp_path):
  """A TFRecord copy that a test may damage."""
  folder = tmp_path / 'copy'
  shutil.copytree(prepared['tfrecord'] / 'tiny' / '1.0.0', folder)
  return folder


def config(data_dir, name='tiny'):
  return dict(name='tfds', builder=name, data_dir=str(data_dir), image_size=8)


def values(source):
  """The constant of every image; fails unless it is one."""
  result = []
  for index in range(len(source)):
    data = source.record(index)['image']
    assert isinstance(data, bytes)
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    assert image.shape == (9, 12, 3)
    assert image.min() == image.max()
    result.append(int(image[0, 0, 0]))
  return result


@pytest.mark.parametrize('file_format', FORMATS)
def test_records_by_name(prepared, file_format):
  source = builder.build_source(config(prepared[file_format]), 'train')
  assert source.info.num_classes == 3
  assert source.info.class_names == NAMES
  assert source.info.num_examples == len(source) == 20
  assert sorted(values(source)) == list(range(20))
  for index, value in enumerate(values(source)):
    assert source.record(index)['label'] == value % 3


@pytest.mark.parametrize('file_format', FORMATS)
def test_records_by_directory(prepared, file_format):
  folder = prepared[file_format] / 'tiny' / '1.0.0'
  by_directory = builder.build_source(config(folder, name=''), 'test')
  by_name = builder.build_source(config(prepared[file_format]), 'test')
  assert values(by_directory) == values(by_name) == list(range(100, 107))


@pytest.mark.parametrize('file_format', FORMATS)
def test_parts_of_splits(prepared, file_format):
  def read(split):
    return values(builder.build_source(config(prepared[file_format]), split))

  whole = read('train')
  assert read('train[:90%]') == whole[:18]
  assert read('train[90%:]') == whole[18:]
  assert read('train[5:11]') == whole[5:11]
  assert read('train[15:]+test') == whole[15:] + read('test')


def test_both_formats_hold_the_same(prepared):
  one, other = (
    builder.build_source(config(prepared[file_format]), 'train')
    for file_format in FORMATS
  )
  assert values(one) == values(other)


@pytest.mark.parametrize('file_format', FORMATS)
def test_batches(prepared, file_format):
  data = builder.build(
    config(prepared[file_format]),
    split='train',
    train=True,
    seed=0,
    batch_size=10,
    num_threads=2,
  )
  source = builder.build_source(config(prepared[file_format]), 'train')
  known = values(source)
  batches = data.batches()
  for _ in range(4):
    batch = next(batches)
    for image, label, index in zip(
      batch['image'], batch['label'], batch['index'], strict=True
    ):
      np.testing.assert_array_equal(image, np.full((8, 8, 3), known[index]))
      assert label == known[index] % 3
  batches.close()


@pytest.mark.parametrize('file_format', FORMATS)
def test_an_unlabelled_record_names_its_shard(prepared, file_format):
  data = builder.build(
    config(prepared[file_format]),
    split='test',
    train=False,
    seed=0,
    batch_size=4,
  )
  with pytest.raises(TooManyBadRecordsError) as error:
    list(data.batches())
  message = str(error.value)
  assert f'tiny-test.{file_format}-00000' in message
  assert 'record 5 (row 5): label -1 not in [0, 2]' in message


@pytest.mark.parametrize('file_format', FORMATS)
def test_nothing_is_written_beside_the_data(prepared, file_format):
  folder = prepared[file_format] / 'tiny' / '1.0.0'
  before = sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir())
  values(builder.build_source(config(prepared[file_format]), 'train'))
  after = sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir())
  assert before == after


@pytest.mark.parametrize('file_format', FORMATS)
def test_reading_does_not_import_tensorflow(prepared, file_format, repository):
  code = f"""
import sys
from dataset_lib import builder
data = builder.build({config(prepared[file_format])!r}, split='train',
                     train=True, seed=0, batch_size=4)
next(data.batches())
print('tensorflow' in sys.modules)
"""
  result = subprocess.run(
    [sys.executable, '-c', code],
    cwd=repository,
    check=True,
    capture_output=True,
    text=True,
  )
  assert result.stdout.strip() == 'False'


@pytest.mark.parametrize(
  ('name', 'split', 'kind', 'words'),
  [
    ('cifar10', 'train', MissingDataError,
     'tfds build cifar10 --data_dir={data_dir} --file_format=array_record'),
    ('cifar1o', 'train', ConfigError, 'dataset.builder: expected a TFDS data'),
    ('', 'train', MissingDataError, 'holds no dataset_info'),
    ('tiny', 'validation', MissingDataError, "split 'validation'; it has "),
  ],
)  # fmt: skip
def test_what_is_not_prepared(prepared, tmp_path, name, split, kind, words):
  data_dir = prepared['tfrecord'] if name == 'tiny' else tmp_path
  with pytest.raises(kind) as error:
    builder.build_source(config(data_dir, name=name), split)
  assert words.format(data_dir=data_dir) in str(error.value)


@pytest.mark.parametrize('file_format', FORMATS)
def test_a_missing_shard(prepared, file_format, tmp_path):
  folder = tmp_path / 'copy'
  shutil.copytree(prepared[file_format] / 'tiny' / '1.0.0', folder)
  os.remove(folder / f'tiny-train.{file_format}-00001')
  with pytest.raises(MissingDataError, match='train'):
    builder.build_source(config(folder, name=''), 'train')


def test_a_damaged_record_is_counted(copy):
  shard = copy / 'tiny-test.tfrecord-00000'
  data = bytearray(shard.read_bytes())
  data[12:60] = bytes(48)  # the first record, behind its length
  shard.write_bytes(data)
  loader = builder.build(
    config(copy, name=''), split='test', train=False, seed=0, batch_size=4
  )
  with pytest.raises(TooManyBadRecordsError, match='record 0'):
    list(loader.batches())


def test_a_set_of_text_is_refused(copy):
  info = copy / 'dataset_info.json'
  content = json.loads(info.read_text())
  content['supervisedKeys']['tuple']['items'][1]['featureKey'] = 'note'
  info.write_text(json.dumps(content))
  with pytest.raises(InvalidDataError, match='Image to Text'):
    builder.build_source(config(copy, name=''), 'train')


@pytest.mark.parametrize('nested', [False, True])
def test_a_set_cannot_run_code(copy, monkeypatch, nested):
  trace = copy / 'trace'
  module = copy / 'evil_module.py'
  module.write_text(f"open({str(trace)!r}, 'w')")
  monkeypatch.syspath_prepend(str(copy))
  file = copy / 'features.json'
  content = json.loads(file.read_text())
  label = content['featuresDict']['features']['label']
  if nested:
    evil = {'type': 'evil_module.Label', 'content': {}}
    label.pop('classLabel')
    label['jsonFeature'] = {'json': json.dumps({'inner': evil})}
  else:
    label['pythonClassName'] = 'evil_module.Label'
  file.write_text(json.dumps(content))
  with pytest.raises(
    InvalidDataError, match=r'would import evil_module\.Label'
  ):
    builder.build_source(config(copy, name=''), 'train')
  by_name = copy.parent / 'sets' / 'tiny' / '1.0.0'
  shutil.copytree(copy, by_name)
  with pytest.raises(InvalidDataError, match='would import'):
    builder.build_source(config(by_name.parents[1]), 'train')
  assert not trace.exists()
  assert 'evil_module' not in sys.modules


@pytest.mark.parametrize(
  'name', ['huggingface:x', 'kaggle:x', '../x', 'x/a=1', 'X', 'x;y', 'x/..']
)
def test_names_that_lead_elsewhere(name):
  with pytest.raises(ConfigError) as error:
    builder.validate(config('/x', name=name))
  assert error.value.field == 'dataset.builder'


@pytest.mark.parametrize(
  'name', ['cifar10', 'a_b/c-d.e', 'x:1.2.3', 'x/y:1.2.3']
)
def test_names_of_builders(name):
  assert builder.validate(config('/x', name=name))['builder'] == name
