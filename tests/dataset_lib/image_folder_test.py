"""Image folders: what counts, faults that name their place, photographs."""

import itertools
import os
import shutil
import tarfile

import cv2
import numpy as np
import pytest

from core.errors import ConfigError, InvalidDataError, MissingDataError
from dataset_lib import builder
from dataset_lib.bad_records import TooManyBadRecordsError
from tests.dataset_lib.batches import build, take


def write_image(path, value=100):
  path.parent.mkdir(parents=True, exist_ok=True)
  assert cv2.imwrite(str(path), np.full((12, 16, 3), value, np.uint8))


@pytest.fixture
def root(tmp_path):
  for split, count in (('train', 3), ('test', 2)):
    for label, name in enumerate(('cat', 'dog')):
      for number in range(count):
        path = tmp_path / 'root' / split / name / f'{number}.jpg'
        write_image(path, 50 + 100 * label)
  return tmp_path / 'root'


def config(root, **others):
  return dict(name='folder', root=str(root), image_size=8, **others)


def source(root, split='train', **fields):
  return builder.build_source(config(root, **fields), split)


def test_records_are_sorted_by_class_and_name(root):
  train = source(root)
  assert len(train) == 6
  assert train.info.class_names == ('cat', 'dog')
  assert train.info.input_shape == (8, 8, 3)
  assert [train.record(i)['label'] for i in range(6)] == [0, 0, 0, 1, 1, 1]
  assert train.where(4) == str(root / 'train' / 'dog' / '1.jpg')
  expected = (root / 'train' / 'dog' / '1.jpg').read_bytes()
  assert train.record(4)['image'] == expected
  (batch,) = take(build(config(root), 'test', train=False, batch_size=4), 9)
  assert batch['image'].shape == (4, 8, 8, 3)
  np.testing.assert_allclose(batch['image'].mean((1, 2, 3)), [50, 50, 150, 150])
  assert batch['label'].tolist() == [0, 0, 1, 1]


def test_images_and_classes_that_count(root):
  for name in ('a.JPG', 'b.jpeg', 'c.png', 'd.webp', 'e.bmp'):
    write_image(root / 'train' / 'cat' / name)
  for name in ('cat/notes.txt', 'cat/.hidden.jpg', 'labels.csv', '../a.md'):
    (root / 'train' / name).write_text('hello')
  (root / 'train' / '.ipynb_checkpoints').mkdir()
  assert len(source(root)) == 11
  # Labels follow the train split; without one they are of all splits.
  write_image(root / 'train' / 'ant' / '0.jpg')
  write_image(root / 'other' / 'cat' / '0.jpg')
  for name, other in (('train', 'part'), ('part', 'train')):
    test = source(root, 'test')
    assert test.info.class_names == ('ant', 'cat', 'dog')
    assert [test.record(i)['label'] for i in (0, 2)] == [1, 2]
    (root / name).rename(root / other)


def test_images_of_train_in_another_split_are_told(root, caplog):
  write_image(root / 'test' / 'cat' / '1.jpg', 200)
  source(root)
  assert not caplog.records
  source(root, 'test')
  assert f'{root}, test: 3 of 4 rows have the images of rows of' in caplog.text


@pytest.mark.parametrize('place', ['train', 'train/fox', 'train/cat/out.jpg'])
def test_links_that_lead_out(tmp_path, root, place):
  outside = tmp_path / 'outside' / place
  write_image(outside if place.endswith('.jpg') else outside / 'a' / '0.jpg')
  if place == 'train':
    os.rename(root / 'train', tmp_path / 'old')
  os.symlink(outside, root / place)
  with pytest.raises(InvalidDataError, match='outside of'):
    source(root)


def test_links_inside_the_root_are_followed(root, tmp_path):
  os.symlink(root / 'train' / 'cat' / '0.jpg', root / 'train' / 'dog' / 'l.jpg')
  assert len(source(root)) == 7
  os.symlink(root, tmp_path / 'link')
  assert len(source(tmp_path / 'link')) == 7


def test_caltech_folders(shared_data, tmp_path):
  archive = shared_data('images', 'caltech101_folders.tar')
  with tarfile.open(archive) as tar:
    files = [member for member in tar.getmembers() if member.isfile()]
    names = sorted({member.name.split('/')[2] for member in files})[:4]
    members = [file for file in files if file.name.split('/')[2] in names]
    tar.extractall(tmp_path, members=members, filter='data')
  given = config(tmp_path / 'caltech101', augment=('inception_crop', 'flip'))
  given['image_size'] = 64
  data = build(given, batch_size=32)
  assert data.info.num_classes == 4
  for batch in take(data, 2 * data.steps_per_epoch):
    assert batch['image'].shape == (32, 64, 64, 3)
    assert batch['image'].std() > 20
  test = build(given, 'test', train=False, batch_size=32)
  masks = np.concatenate([batch['mask'] for batch in test.batches()])
  assert masks.sum() == test.info.num_examples
  assert data.bad_records == test.bad_records == {}


SPLITS = 'train', 'validation', 'test'


@pytest.fixture
def photos(tmp_path):
  """Folders of classes: 10 cats, 20 dogs, two of which are one photograph."""
  for name, count, start in (('cat', 10, 0), ('dog', 20, 100)):
    for i in range(count):
      write_image(tmp_path / 'photos' / name / f'{i}.png', start + i)
  write_image(tmp_path / 'photos' / 'dog' / '7.png', 112)  # as 12.png
  return tmp_path / 'photos'


def names_of(data):
  return ['/'.join(data.where(i).split('/')[-2:]) for i in range(len(data))]


def test_a_folder_of_classes_is_split(photos):
  parts = {split: source(photos, split) for split in SPLITS}
  found = {split: names_of(one) for split, one in parts.items()}
  sizes = {split: len(names) for split, names in found.items()}
  every = sorted(itertools.chain(*found.values()))
  assert every == sorted(names_of(source(photos, 'all')))
  cats = {k: sum(n.startswith('cat') for n in x) for k, x in found.items()}
  assert cats == {'train': 6, 'validation': 2, 'test': 2}
  assert abs(sizes['train'] - 18) <= 1
  assert len({k for k, names in found.items()
              if {'dog/7.png', 'dog/12.png'} & {*names}}) == 1  # fmt: skip
  for one in parts.values():
    assert one.info.class_names == ('cat', 'dog')
    assert one.info.splits['rows'] == sizes
    assert one.info.splits == parts['train'].info.splits
  # A part of a split has the shares of the classes.
  half = names_of(source(photos, 'train[:50%]'))
  assert sum(name.startswith('cat') for name in half) == 3
  assert {*half} < {*found['train']}
  assert names_of(source(photos, 'test', split_seed=1)) != found['test']
  other = source(photos, 'test', split_shares=(0.6, 0.0, 0.4))
  assert abs(len(other) - 12) <= 1


@pytest.mark.parametrize(
  ('folder', 'place', 'split', 'words'),
  [
    ('root', 'test/yak/0.jpg', 'test', 'yak'),
    ('root', 'train/eel/', 'train', 'eel holds no images'),
    ('root', 'none/', 'none', 'no images in'),
    ('root', 'train/stray.jpg', 'train', r'stray\.jpg'),
    ('root', 'train/cat/more/0.jpg', 'train', 'more is a folder'),
    ('root', '', 'validation', "'validation'.*'test', 'train'"),
    ('photos', 'dog/more/1.png', 'train',
     r'an image .*cat/0\.png and a folder .*more'),
    ('photos', '', 'val',
     "no split 'val'.*'train', 'validation', 'test', 'all'"),
    ('photos', '-dog', 'train', r"2 classes or more, got \['cat'\]"),
  ],
)  # fmt: skip
def test_faults_of_the_layout_are_named(folder, place, split, words, request):
  folder = request.getfixturevalue(folder)
  if place.startswith('-'):
    shutil.rmtree(folder / place[1:])
  elif place.endswith('/'):
    (folder / place).mkdir()
  elif place:
    write_image(folder / place)
  with pytest.raises((InvalidDataError, MissingDataError), match=words):
    source(folder, split)
  with pytest.raises(MissingDataError, match='nowhere'):
    source(folder / 'nowhere')


def test_a_link_to_no_file_is_a_bad_record(photos):
  os.symlink('none.png', photos / 'cat' / 'link.png')
  os.symlink('loop.png', photos / 'cat' / 'loop.png')
  with pytest.raises(TooManyBadRecordsError, match='unreadable: 1'):
    take(build(config(photos), 'all', train=False, batch_size=40), 1)


def test_a_split_without_images_is_named(photos):
  for path in photos.rglob('[1-9]*.png'):
    path.unlink()
  assert len(source(photos)) == 2
  with pytest.raises(InvalidDataError, match=r"'test' of .* has no images"):
    source(photos, 'test')


def table(photos, *rows):
  lines = [f'{p.relative_to(photos)},{p.parent.name}'
           for p in sorted(photos.rglob('*.png'))]  # fmt: skip
  path = photos / 'labels.csv'
  path.write_text('\n'.join(['path,label', *lines, *rows]))
  return path


def test_a_table_of_paths_and_labels_has_the_splits_of_the_folder(photos):
  # A folder with a table is still a folder of classes.
  file = table(photos)
  for split in (*SPLITS, 'all', 'test[:50%]'):
    one, other = source(photos, split), source(file, split)
    assert names_of(one) == names_of(other)
    assert one.info == other.info
    assert one.record(1) == other.record(1)
  file.write_text(file.read_text().replace('path,label', 'file,species'))
  named = source(file, path='file', label='species')
  assert names_of(named) == names_of(source(photos))
  with pytest.raises(ConfigError, match=r'dataset\.path: .*labels\.csv.* file'):
    source(file)
  digest = source(file, 'all', path='file', label='species').info.digest
  file.write_text(file.read_text().replace('0.png,cat', '0.png,dog'))
  moved = source(file, 'all', path='file', label='species')
  assert moved.info.digest != digest


def test_rows_of_a_group_are_in_one_split(photos):
  paths = sorted(photos.rglob('*.png'))
  lines = [f'{p.relative_to(photos)},{p.parent.name},'
           f'{int(p.stem) // 2}{" " * (n % 3)}'
           for n, p in enumerate(paths)]  # fmt: skip
  file = photos / 'labels.csv'
  file.write_text('\n'.join(['path,label,day', *lines]))
  sources = [source(file, split, group='day') for split in SPLITS]
  days = [{int(n[4:-4]) // 2 for n in names_of(one)} for one in sources]
  assert set().union(*days) == {*range(10)}
  assert sum(map(len, days)) == 10
  assert all(days)
  assert sources[0].info.splits['group'] == 'day'
  with pytest.raises(ConfigError, match=r'dataset\.group: .*labels\.csv'):
    source(file, group='night')


def test_bad_rows_of_a_table_are_named(photos, tmp_path):
  write_image(tmp_path / 'out.png')
  rows = ('cat/99.png,cat', 'cat/1.png,', '../out.png,cat', 'dog,dog',
          'a' * 9999 + ',cat', './cat/1.png,dog')  # fmt: skip
  file = table(photos, *rows)
  assert names_of(source(file, 'test')) == names_of(source(photos, 'test'))
  train = source(file)
  assert names_of(train) == names_of(source(photos))
  found = [(bad.kind, bad.where) for _, bad in train.bad_rows]
  kinds = ('missing', 'illegal_label', 'illegal_path', 'missing', 'missing',
           'contradiction')  # fmt: skip
  assert found == [(kind, f'{file}, line {32 + i}')
                   for i, kind in enumerate(kinds)]  # fmt: skip
  file.write_text('path,label\n' + '\n'.join(rows[:5]))
  with pytest.raises(InvalidDataError, match=r'no row.*no file .*99\.png'):
    source(file)
