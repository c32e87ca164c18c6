"""Candidates of the input benchmark read the same files, in batches."""

import types

import pytest

from benchmarks import input as input_candidates
from tests.dataset_lib import image_folder_test

pytest.importorskip('tensorflow_datasets')


def test_candidates_read_a_folder(tmp_path):
  for name in ('cat', 'dog'):
    for number in range(32):
      path = tmp_path / 'train' / name / f'{number}.jpg'
      image_folder_test.write_image(path)
  flags = types.SimpleNamespace(root=str(tmp_path), image_size=8, images=130)
  seen = {}
  for case, candidates in input_candidates.cases(flags):
    assert case['cores'] >= 1
    for one in candidates:
      if one.process == 'torch':
        continue  # its workers would start this process again
      call = one.make()
      call.run()
      seen[one.name] = call.rows
  # Whole batches of 64, of files that are read twice.
  assert seen == dict.fromkeys(
    ('ours, folder', 'ours, tfrecord', 'ours, array_record',
     'tf.data, folder'), 128,
  )  # fmt: skip
