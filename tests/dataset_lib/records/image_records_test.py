"""Records of images with several labels, in both formats, and faults."""

import types

import numpy as np
import pytest

from core import errors
from core.errors import BadRecord, InvalidDataError, MissingDataError
from dataset_lib import builder
from dataset_lib.bad_records import TooManyBadRecordsError
from dataset_lib.records import tfds
from tests.dataset_lib import example_files
from tests.dataset_lib.batches import build, take

pytest.importorskip('tensorflow_datasets')

KINDS = ('tfrecord', 'array_record')
CLASSES = 18_291
# One to three labels, and none.
LABELS = [[7 * i + j for j in range(i % 4)] for i in range(13)]
SHARDS = (slice(0, 5), slice(5, 6), slice(6, 13))


def write(folder, images, kind='tfrecord', labels=LABELS):
  records = [*map(example_files.example, images, labels)]
  for number, rows in enumerate(SHARDS):
    name = f'train-{number:05}-of-{len(SHARDS):05}.{kind}'
    example_files.write(folder / name, records[rows])
  example_files.write(folder / f'test-0.{kind}', records[:3])
  return folder


@pytest.fixture(scope='module')
def images():
  return [example_files.jpeg(10 * i) for i in range(len(LABELS))]


@pytest.fixture(params=KINDS)
def folder(request, tmp_path, images):
  return write(tmp_path / 'jft', images, request.param)


def config(folder, **others):
  given = dict(num_classes=CLASSES, max_labels=3, image_size=8) | others
  return dict(name='records', directory=str(folder), **given)


def source(folder, split='train', **others):
  return builder.build_source(config(folder, **others), split)


def padded(labels):
  return [[*row, *[-1] * (3 - len(row))] for row in labels]


def test_records_are_in_the_order_of_their_files(folder, images):
  train = source(folder)
  assert len(train) == train.info.num_examples == 13
  assert train.info.label_shape == (3,)
  for index, labels in enumerate(LABELS):
    record = train.record(index)
    assert (record['image'], record['label']) == (images[index], labels)
  assert 'train-00001-of-00003' in train.where(5)
  assert train.where(12).endswith(', record 6')


def test_batches_have_padded_labels(folder):
  rows = np.array(padded(LABELS), np.int32)
  given = config(folder, augment=('inception_crop', 'flip', 'randaugment'))
  for batch in take(build(given, batch_size=4), 5):
    assert batch['label'].dtype == np.int32
    np.testing.assert_array_equal(batch['label'], rows[batch['index']])
  *_, last = take(build(given, train=False, batch_size=8), 3)
  # Rows without a label, as the first, have no weight.
  assert last['mask'].tolist() == [0, 1, 1, 1, 0] + [0] * 3
  np.testing.assert_array_equal(last['label'][:5], rows[8:])
  np.testing.assert_array_equal(last['label'][5:], np.full((3, 3), -1))


def test_one_label_a_row(tmp_path, images):
  single = [[i] for i in range(13)]
  write(tmp_path, images, labels=single)
  train = build(config(tmp_path, max_labels=0), train=False, batch_size=13)
  [batch] = take(train, 1)
  assert batch['label'].tolist() == list(range(13))
  assert train.info.label_shape == ()
  write(tmp_path, images)
  with pytest.raises(BadRecord, match='expected 1 label, got 0'):
    source(tmp_path, max_labels=0).record(0)
  record = example_files.example(images[0], [1])
  record = record.replace(b'\x1a\x03\x0a\x01\x01', b'\x0a\x03\x0a\x01\x01')
  example_files.write(tmp_path / 'bytes-0.tfrecord', [record])
  with pytest.raises(BadRecord, match='expected an int64_list, got a bytes'):
    source(tmp_path, 'bytes', max_labels=2).record(0)


@pytest.mark.parametrize(
  ('record', 'words'),
  [
    ((b'', [CLASSES]), r'label 18291 not in \[0, 18290\]'),
    ((b'', [1, -1]), 'label -1 not in'),
    ((b'', [1, 2, 3, 4]), r'4 labels, more than dataset\.max_labels = 3'),
    ((b'', None), "no feature 'image/class/label', but image/encoded"),
    ((b'', [1], 'image/label'), "no feature 'image/class/label', but image/"),
    ((b'', [1], 'image/class/label', 2), 'expected 1 image, got 2'),
    (None, 'unparsable'),
    ((b'no image', [1]), 'no image Pillow can read'),
  ],
)
def test_a_bad_record_is_named(tmp_path, images, record, words):
  good = example_files.example(images[0], [1])
  bad = example_files.example(*record) if record else good[:-3]
  example_files.write(tmp_path / 'train-0.tfrecord', [good, bad])
  with pytest.raises(TooManyBadRecordsError, match=words) as error:
    take(build(config(tmp_path), train=False, batch_size=2), 1)
  assert 'train-0.tfrecord, record 1' in str(error.value)


def test_what_is_not_there(folder, images):
  for split, words in (
    ('train+dev', r'no files dev-\*\.tfrecord or dev-\*\.array_record in'),
    ('../train', 'split: expected a split or a part'),
  ):
    with pytest.raises((MissingDataError, errors.ConfigError), match=words):
      source(folder, split)
  [last] = folder.glob('train-00002*')
  last.unlink()
  with pytest.raises(MissingDataError, match=r'2 shards .* names say 3; copy'):
    source(folder)
  other = KINDS[last.suffix == '.tfrecord']
  example_files.write(folder / f'other-0.{other}', [b''])
  with pytest.raises(InvalidDataError, match='two formats'):
    source(folder, 'test+other')
  (folder / f'cut-0{last.suffix}').write_bytes(bytes(90))
  with pytest.raises(InvalidDataError, match='cut-0'):
    source(folder, 'cut')


def test_a_data_set_in_another_format_is_refused():
  one = types.SimpleNamespace(num_examples=1, file_instructions=[])
  info = types.SimpleNamespace(
    full_name='tiny', features={}, splits={'train': one, 'train[0:1]': one},
    file_format=types.SimpleNamespace(value='riegeli'),
  )  # fmt: skip
  words = 'tiny is riegeli: expected tfrecord.* --file_format=array_record'
  with pytest.raises(InvalidDataError, match=words):
    tfds.examples(types.SimpleNamespace(info=info), 'train', [])
