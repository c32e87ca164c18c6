"""Image folders: what counts, faults that name their place, photographs."""

import os
import tarfile

import cv2
import numpy as np
import pytest

from dataset_lib import builder
from dataset_lib.errors import (
  BadRecord,
  ConfigError,
  InvalidDataError,
  MissingDataError,
)


def write_image(path, value=100, size=(12, 16)):
  path.parent.mkdir(parents=True, exist_ok=True)
  image = np.full((*size, 3), value, np.uint8)
  assert cv2.imwrite(str(path), image)


@pytest.fixture
def root(tmp_path):
  for split, count in (('train', 3), ('test', 2)):
    for label, name in enumerate(('cat', 'dog')):
      for number in range(count):
        write_image(tmp_path / split / name / f'{number}.jpg', 50 + 100 * label)
  return tmp_path


def source(root, split='train'):
  config = dict(name='folder', root=str(root), image_size=8)
  return builder.build_source(config, split)


def test_records_are_sorted_by_class_and_name(root):
  train = source(root)
  assert len(train) == 6
  assert train.info.class_names == ('cat', 'dog')
  assert train.info.num_classes == 2
  assert train.info.input_shape == (8, 8, 3)
  assert [train.record(i)['label'] for i in range(6)] == [0, 0, 0, 1, 1, 1]
  assert train.where(4) == str(root / 'train' / 'dog' / '1.jpg')
  expected = (root / 'train' / 'dog' / '1.jpg').read_bytes()
  assert train.record(4)['image'] == expected


def test_batches_decode_the_images(root):
  config = dict(name='folder', root=str(root), image_size=8)
  data = builder.build(config, split='test', train=False, seed=0, batch_size=4)
  (batch,) = data.batches()
  assert batch['image'].shape == (4, 8, 8, 3)
  np.testing.assert_allclose(batch['image'].mean((1, 2, 3)), [50, 50, 150, 150])
  assert batch['label'].tolist() == [0, 0, 1, 1]


def test_images_and_classes_that_count(root):
  for name in ('a.JPG', 'b.jpeg', 'c.png', 'd.webp', 'e.bmp'):
    write_image(root / 'train' / 'cat' / name)
  for name in ('cat/notes.txt', 'cat/.hidden.jpg', 'labels.csv'):
    (root / 'train' / name).write_text('hello')
  (root / 'train' / '.ipynb_checkpoints').mkdir()
  (root / 'README.md').write_text('hello')
  assert len(source(root)) == 11
  # Labels follow the train split.
  write_image(root / 'train' / 'ant' / '0.jpg')
  assert source(root, 'test').info.class_names == ('ant', 'cat', 'dog')
  assert [source(root, 'test').record(i)['label'] for i in (0, 2)] == [1, 2]


def test_without_a_train_split_classes_are_the_union(tmp_path):
  write_image(tmp_path / 'a' / 'x' / '0.jpg')
  write_image(tmp_path / 'b' / 'y' / '0.jpg')
  assert source(tmp_path, 'b').info.class_names == ('x', 'y')
  assert source(tmp_path, 'b').record(0)['label'] == 1


@pytest.mark.parametrize(
  ('place', 'split', 'error', 'words'),
  [
    ('test/yak/0.jpg', 'test', InvalidDataError, 'yak'),
    ('train/eel/', 'train', InvalidDataError, 'eel holds no images'),
    ('none/', 'none', InvalidDataError, 'no images in'),
    ('train/stray.jpg', 'train', InvalidDataError, r'stray\.jpg'),
    ('train/cat/more/0.jpg', 'train', InvalidDataError, 'more is a folder'),
    ('', 'validation', MissingDataError, "'validation'.*test, train"),
    *(
      ('', split, ConfigError, 'split: ')
      for split in ('..', '../x', 'a/b', '.', '/etc', '', 'a\\b')
    ),
  ],
)
def test_faults_of_the_layout_are_named(root, place, split, error, words):
  if place.endswith('/'):
    (root / place).mkdir()
  elif place:
    write_image(root / place)
  with pytest.raises(error, match=words):
    source(root, split)


def test_a_missing_root(tmp_path):
  with pytest.raises(MissingDataError, match='nowhere'):
    source(tmp_path / 'nowhere')


@pytest.mark.parametrize('place', ['train', 'train/fox', 'train/cat/out.jpg'])
def test_links_that_lead_out(tmp_path, root, place):
  data = tmp_path / 'data'
  os.makedirs(data)
  for split in ('train', 'test'):
    os.rename(root / split, data / split)
  outside = tmp_path / 'outside'
  write_image(outside / 'cat' / '0.jpg')
  target = data / place
  if place == 'train':
    os.rename(data / 'train', tmp_path / 'old')
    os.symlink(outside, target)
  elif place == 'train/fox':
    os.symlink(outside / 'cat', target)
  else:
    os.symlink(outside / 'cat' / '0.jpg', target)
  with pytest.raises(InvalidDataError, match='outside of'):
    source(data)


def test_links_inside_the_root_are_followed(root, tmp_path):
  os.symlink(root / 'train' / 'cat' / '0.jpg', root / 'train' / 'dog' / 'l.jpg')
  assert len(source(root)) == 7
  link = tmp_path / 'link'
  os.symlink(root, link)
  assert len(source(link / 'link')) == 7


@pytest.mark.parametrize('fault', ['a folder', 'vanished'])
def test_what_cannot_be_read_is_a_bad_record(root, fault):
  path = root / 'train' / 'cat' / 'x.jpg'
  path.mkdir()
  given = source(root)
  if fault == 'vanished':
    path.rmdir()
  with pytest.raises(BadRecord) as error:
    given.record(3)
  assert error.value.kind == 'unreadable'
  assert error.value.where == str(path)


def unpack(archive, folder, classes=4):
  """The first classes; the 'data' filter refuses paths that lead out."""
  with tarfile.open(archive) as tar:
    names = sorted({m.name.split('/')[2] for m in tar if m.isfile()})[:classes]
    members = [
      member
      for member in tar.getmembers()
      if member.isfile() and member.name.split('/')[2] in names
    ]
    tar.extractall(folder, members=members, filter='data')
  return folder / 'caltech101'


def test_caltech_folders(shared_data, tmp_path):
  archive = shared_data / 'images' / 'caltech101_folders.tar'
  if not archive.is_file():
    pytest.skip(f'no {archive}')
  root = unpack(archive, tmp_path)
  config = dict(
    name='folder',
    root=str(root),
    image_size=64,
    augment=('inception_crop', 'flip'),
  )
  data = builder.build(config, split='train', train=True, seed=0, batch_size=32)
  assert data.info.num_classes == 4
  batches = data.batches()
  for _ in range(2 * data.steps_per_epoch):
    batch = next(batches)
    assert batch['image'].shape == (32, 64, 64, 3)
    assert batch['image'].std() > 20
  batches.close()
  test = builder.build(config, split='test', train=False, seed=0, batch_size=32)
  masks = np.concatenate([batch['mask'] for batch in test.batches()])
  assert masks.sum() == test.info.num_examples
  assert data.bad_records == test.bad_records == {}
