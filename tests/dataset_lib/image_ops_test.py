"""Resizing and augmentation against hand-made cases and plain NumPy."""

import cv2
import numpy as np
import pytest

from dataset_lib import image_ops, order
from tests.dataset_lib.pictures import NOISE, cropping, encode, options, smooth


def bilinear_loop(image, height, width):
  """Bilinear interpolation with half-pixel centres, one pixel at a time."""
  result = np.zeros((height, width, image.shape[2]))
  for row in range(height):
    for column in range(width):
      y = (row + 0.5) * image.shape[0] / height - 0.5
      x = (column + 0.5) * image.shape[1] / width - 0.5
      y = min(max(y, 0), image.shape[0] - 1)
      x = min(max(x, 0), image.shape[1] - 1)
      top, left = int(y), int(x)
      bottom = min(top + 1, image.shape[0] - 1)
      right = min(left + 1, image.shape[1] - 1)
      dy, dx = y - top, x - left
      result[row, column] = (
        image[top, left] * (1 - dy) * (1 - dx)
        + image[top, right] * (1 - dy) * dx
        + image[bottom, left] * dy * (1 - dx)
        + image[bottom, right] * dy * dx
      )
  return result


@pytest.mark.parametrize('shape', [(33, 41), (14, 25), (20, 15)])
def test_resize_is_bilinear(shape):
  resized = image_ops.resize(NOISE, *shape)
  assert np.abs(resized - bilinear_loop(NOISE, *shape)).max() <= 1.0


def test_strong_shrinking_averages():
  resized = image_ops.resize(NOISE, 5, 10)
  means = NOISE.reshape(5, 4, 10, 3, 3).mean(axis=(1, 3))
  assert np.abs(resized - means).max() <= 0.51
  assert image_ops.resize(NOISE, 20, 30) is NOISE


@pytest.mark.parametrize(
  ('shape', 'expected'),
  [((20, 30), (16, 24)), ((30, 20), (24, 16)), ((7, 7), (16, 16))],
)
def test_resize_small_keeps_the_ratio(shape, expected):
  image = np.zeros((*shape, 3), np.uint8)
  assert image_ops.resize_small(image, 16).shape[:2] == expected


@pytest.mark.parametrize('shape', [(1, 3000), (3000, 1), (1, 1), (64, 300)])
def test_evaluation_of_extreme_shapes(shape):
  image = np.full((*shape, 3), 9, np.uint8)
  result = options(image_size=32).transform(image)
  np.testing.assert_array_equal(result, np.full((32, 32, 3), 9))


def test_evaluation_frames_the_centre():
  image = np.zeros((64, 192, 3), np.uint8)
  image[:, 64:128] = 200
  result = options(28).transform(encode(image))
  assert result.shape == (28, 28, 3)
  np.testing.assert_array_equal(result, np.full((28, 28, 3), 200))
  whole = options(28, 40).transform(encode(image))
  assert whole.min() == 200


def test_inception_boxes_cover_the_legal_range():
  rng = np.random.default_rng(1)
  height, width = 300, 400
  areas, ratios, tops = [], [], []
  for _ in range(2000):
    top, left, box_height, box_width = image_ops.inception_box(
      height, width, rng, 0.08
    )
    assert 0 <= top <= height - box_height
    assert 0 <= left <= width - box_width
    areas.append(box_height * box_width / (height * width))
    ratios.append(box_width / box_height)
    tops.append(top)
  assert 0.075 < min(areas) < 0.1
  assert max(areas) > 0.9
  assert 0.72 < min(ratios) < 0.77
  assert 1.3 < max(ratios) < 1.36
  assert min(tops) == 0
  # Small boxes always fit, so below half the area the draw is uniform.
  counts, _ = np.histogram(areas, bins=6, range=(0.08, 0.5))
  assert counts.max() / counts.min() < 1.4


@pytest.mark.parametrize('shape', [(1, 1), (1, 500), (500, 1), (3, 2)])
def test_inception_boxes_of_extreme_shapes_fit(shape):
  for seed in range(50):
    rng = np.random.default_rng(seed)
    top, left, height, width = image_ops.inception_box(*shape, rng, 0.9)
    assert 0 <= top < top + height <= shape[0]
    assert 0 <= left < left + width <= shape[1]


def test_an_inception_crop_of_pixels_is_its_box_resized():
  for index in range(20):
    key = 0, 0, index
    box = image_ops.inception_box(20, 30, order.record_rng(*key), 0.08)
    top, left, height, width = box
    pixels = NOISE[top : top + height, left : left + width]
    for value in (NOISE, encode(NOISE)):
      crop = cropping().transform(value, order.record_rng(*key))
      np.testing.assert_array_equal(crop, image_ops.resize(pixels, 8, 8))


@pytest.mark.parametrize('shape', [(256, 384), (255, 381), (250, 390)])
def test_reduced_decoding_shows_the_same_crop(monkeypatch, shape):
  data = encode(smooth(*shape), '.jpg', cv2.IMWRITE_JPEG_QUALITY, 95)
  reductions = []
  real = image_ops._reduction

  def spy(*sizes):
    reductions.append(real(*sizes))
    return reductions[-1]

  for index in range(20):
    monkeypatch.setattr(image_ops, '_reduction', spy)
    reduced = cropping(24).transform(data, order.record_rng(0, 0, index))
    monkeypatch.setattr(image_ops, '_reduction', lambda *sizes: 1)
    full = cropping(24).transform(data, order.record_rng(0, 0, index))
    # Half a pixel at 1/8 of the size is 4 pixels, about 4 values of the ramp.
    assert np.abs(reduced.astype(int) - full).max() <= 8
    assert np.abs(reduced.astype(int) - full).mean() <= 3
  assert {2, 4, 8} <= set(reductions)


def test_flip_mirrors_half_of_the_images():
  flipped = 0
  plain = options(30, 30).transform(NOISE)
  for index in range(200):
    given = options(30, 30, augment=('flip',))
    result = given.transform(NOISE, order.record_rng(0, 0, index))
    if np.array_equal(result, plain[:, ::-1]):
      flipped += 1
    else:
      np.testing.assert_array_equal(result, plain)
  assert 70 < flipped < 130
