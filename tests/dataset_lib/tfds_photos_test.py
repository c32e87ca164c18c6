"""TFDS directories as of ImageNet, and of several labels as of JFT."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from dataset_lib import builder, record_files
from dataset_lib.errors import ConfigError, TooManyBadRecordsError
from tests.dataset_lib.batches import build, take

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    importlib.util.find_spec('tensorflow') is None
    or importlib.util.find_spec('tensorflow_datasets') is None,
    reason='writing TFDS files needs tensorflow and tensorflow_datasets',
  ),
]


@pytest.fixture(scope='module')
def root(tmp_path_factory):
  root = tmp_path_factory.mktemp('tfds')
  code = (
    f'from tests.dataset_lib import tfds_files as t; t.photos({str(root)!r})'
  )
  subprocess.run([sys.executable, '-c', code], check=True, capture_output=True)
  return root


@pytest.fixture(params=['array_record', 'tfrecord'])
def data_dir(request, root):
  return str(root / request.param)


def config(data_dir, name, **others):
  return dict(
    name='tfds', builder=name, data_dir=data_dir, image_size=8, **others
  )


def labels_of(config, split):
  part = builder.build_source(config, split)
  return [part.record(index)['label'] for index in range(len(part))]


def test_images_as_of_imagenet(data_dir, monkeypatch):
  given = config(data_dir, 'photos')
  info = builder.build_source(given, 'train').info
  assert (info.num_classes, info.class_names[80]) == (1000, 'n00000080')
  whole = labels_of(given, 'train')
  assert sorted(whole) == [80 * i for i in range(12)]
  # The second opening scans no file.
  monkeypatch.setattr(record_files, 'record_offsets', None)
  for split, rows in {
    'train[:99%]': whole, 'train[:75%]': whole[:9], 'train[75%:]': whole[9:],
    'train[5:7]': whole[5:7],
  }.items():  # fmt: skip
    assert labels_of(given, split) == rows
  augment = ('inception_crop', 'flip', 'randaugment')
  [batch] = take(build({**given, 'augment': augment}, batch_size=4), 1)
  assert batch['image'].shape == (4, 8, 8, 3)
  assert batch['label'].tolist() == [whole[i] for i in batch['index']]


def test_images_with_several_labels(data_dir):
  given = config(data_dir, 'many', max_labels=2)
  data = build(given, train=False, batch_size=5)
  assert (data.info.num_classes, data.info.label_shape) == (18_291, (2,))
  *batches, last = data.batches()
  assert last['label'][2:].tolist() == [[-1, -1]] * 3  # padding
  found = np.concatenate([*(b['label'] for b in batches), last['label'][:2]])
  expected = [
    [1000 * i + j if j < i % 3 else -1 for j in range(2)] for i in range(12)
  ]
  assert sorted(found.tolist()) == sorted(expected)
  one = build({**given, 'max_labels': 1}, train=False, batch_size=5)
  with pytest.raises(TooManyBadRecordsError, match='2 labels, more than'):
    list(one.batches())
  for name, most, kind in (('many', 0, 'several '), ('photos', 2, '')):
    words = rf'dataset\.max_labels: .* has {kind}ClassLabel, got {most}'
    with pytest.raises(ConfigError, match=words):
      labels_of(config(data_dir, name, max_labels=most), 'train')
