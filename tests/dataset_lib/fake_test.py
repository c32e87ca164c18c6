"""Fake images are seeded, learnable and say that they are fake."""

import numpy as np

from dataset_lib import builder

CONFIG = dict(name='fake_images', image_size=8, num_classes=3)


def test_records_are_a_function_of_split_and_index():
  first = builder.build_source(CONFIG, 'train')
  again = builder.build_source(CONFIG, 'train')
  other = builder.build_source(CONFIG, 'test')
  image = first.record(5)['image']
  assert image.shape == (8, 8, 3)
  assert image.dtype == np.uint8
  np.testing.assert_array_equal(image, again.record(5)['image'])
  assert np.any(image != other.record(5)['image'])
  assert np.any(image != first.record(8)['image'])


def test_the_names_say_fake():
  info = builder.build_source(CONFIG, 'train').info
  assert info.class_names == ('fake_0', 'fake_1', 'fake_2')


def test_classes_differ_in_colour_by_more_than_the_noise():
  source = builder.build_source(CONFIG, 'train')
  colours = np.array(
    [source.record(index)['image'].mean(axis=(0, 1)) for index in range(30)]
  )
  labels = np.arange(30) % 3
  means = np.stack([colours[labels == label].mean(0) for label in range(3)])
  nearest = np.argmin(((colours[:, None] - means) ** 2).sum(-1), axis=1)
  assert np.mean(nearest == labels) > 0.95
