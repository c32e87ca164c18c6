"""Image folders: every layout fault is an error that names its place."""

import os

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


def test_every_extension_and_case_counts(root):
  for name in ('a.JPG', 'b.jpeg', 'c.png', 'd.webp', 'e.bmp'):
    write_image(root / 'train' / 'cat' / name)
  assert len(source(root)) == 11


def test_labels_follow_the_train_split(root):
  write_image(root / 'train' / 'ant' / '0.jpg')
  assert source(root, 'test').info.class_names == ('ant', 'cat', 'dog')
  assert [source(root, 'test').record(i)['label'] for i in (0, 2)] == [1, 2]


def test_without_a_train_split_classes_are_the_union(tmp_path):
  write_image(tmp_path / 'a' / 'x' / '0.jpg')
  write_image(tmp_path / 'b' / 'y' / '0.jpg')
  assert source(tmp_path, 'b').info.class_names == ('x', 'y')
  assert source(tmp_path, 'b').record(0)['label'] == 1


def test_hidden_and_other_files_are_left_out(root):
  (root / 'train' / 'cat' / 'notes.txt').write_text('hello')
  (root / 'train' / 'cat' / '.hidden.jpg').write_text('hello')
  (root / 'train' / '.ipynb_checkpoints').mkdir()
  (root / 'README.md').write_text('hello')
  (root / 'train' / 'labels.csv').write_text('hello')
  assert len(source(root)) == 6


def test_a_class_that_train_lacks(root):
  write_image(root / 'test' / 'yak' / '0.jpg')
  with pytest.raises(InvalidDataError, match='yak'):
    source(root, 'test')
  assert len(source(root, 'train')) == 6


def test_an_empty_class(root):
  (root / 'train' / 'eel').mkdir()
  with pytest.raises(InvalidDataError, match='eel holds no images'):
    source(root)


def test_no_images_at_all(tmp_path):
  (tmp_path / 'train').mkdir()
  with pytest.raises(InvalidDataError, match='no images in'):
    source(tmp_path)


def test_images_outside_of_class_folders(root):
  write_image(root / 'train' / 'stray.jpg')
  with pytest.raises(InvalidDataError, match=r'stray\.jpg'):
    source(root)


def test_folders_inside_class_folders(root):
  write_image(root / 'train' / 'cat' / 'more' / '0.jpg')
  with pytest.raises(InvalidDataError, match='more is a folder'):
    source(root)


def test_a_missing_root(tmp_path):
  with pytest.raises(MissingDataError, match='nowhere'):
    source(tmp_path / 'nowhere')


def test_a_missing_split_lists_the_others(root):
  with pytest.raises(MissingDataError, match=r"'validation'.*test, train"):
    source(root, 'validation')


@pytest.mark.parametrize(
  'split', ['..', '../x', 'a/b', '.', '/etc', '', 'a\\b']
)
def test_a_split_is_no_path(root, split):
  with pytest.raises(ConfigError) as error:
    source(root, split)
  assert error.value.field == 'split'


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


def test_a_folder_named_like_an_image_is_a_bad_record(root):
  (root / 'train' / 'cat' / 'x.jpg').mkdir()
  with pytest.raises(BadRecord) as error:
    source(root).record(3)
  assert error.value.kind == 'unreadable'
  assert error.value.where.endswith('cat/x.jpg')


def test_a_file_that_vanished_is_a_bad_record(root):
  train = source(root)
  (root / 'train' / 'cat' / '0.jpg').unlink()
  with pytest.raises(BadRecord) as error:
    train.record(0)
  assert error.value.kind == 'unreadable'
