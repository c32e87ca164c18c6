"""Real photographs: greyscale among them, many sizes."""

import tarfile

import numpy as np
import pytest

from dataset_lib import builder


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
