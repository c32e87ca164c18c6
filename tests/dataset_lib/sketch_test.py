"""Shapes without data are those of the batches that are read."""

import contextlib

import numpy as np
import pytest

from dataset_lib.sketch import sketch
from tests.golden import adapter
from train_lib import build

SUBJECTS = (
  'parity adatape', 'digits vit', 'image_folder learn', 'table1 learn',
  'eat sst2', 'eat stsb', 'eat tags', 'albert mnli', 'albert past_present',
  'albert pretrain act', 'recurrent logic', 'recurrent parity',
)  # fmt: skip


@pytest.mark.parametrize('subject', SUBJECTS)
def test_shapes_of_a_batch(subject, folders):
  config = adapter.load(*adapter.configs()[subject], folders)
  dataset = build.build_dataset(config)
  info = dataset.info
  # What generated data know themselves is not asked for.
  is_generated = not {'root', 'directory', 'data_dir'} & {*config.dataset}
  asked = (7, 7) if is_generated else (info.num_classes, info.num_examples)
  found = sketch(config.dataset, config.train_split, *asked)
  for name in ('input_key', 'input_shape', 'input_dtype', 'num_classes'):
    assert getattr(found.info, name) == getattr(info, name), name
  for name in ('label_dtype', 'max_labels', 'num_examples'):
    assert getattr(found.info, name) == getattr(info, name), name
  with contextlib.closing(dataset.batches()) as batches:
    batch = next(batches)
  length = batch[info.input_key].shape[1:]

  def longest(value):
    shape = np.shape(value)[1:]
    return info.input_shape if shape == length else shape

  assert found.rows == {
    name: (longest(value), str(value.dtype)) for name, value in batch.items()
  }
