"""RandAugment: each operation against Pillow or NumPy called by hand."""

import numpy as np
import PIL.Image
import pytest
from PIL import ImageEnhance, ImageOps

from dataset_lib import image_ops, order, randaugment

SHAPE = (24, 40, 3)
NOISE = np.random.default_rng(0).integers(30, 220, SHAPE).astype(np.uint8)
UNCHANGED_AT_0 = (
  'rotate', 'shear_x', 'shear_y', 'translate_x', 'translate_y', 'cutout',
  'solarize_add',
)  # fmt: skip


class Fixed(np.random.Generator):
  """A generator that draws what a test says."""

  def __init__(self, uniform=0.0, *integers):
    super().__init__(np.random.PCG64(0))
    self.uniform, self.drawn = uniform, list(integers)

  def random(self):
    return self.uniform

  def integers(self, high):
    assert self.drawn[0] < high
    return self.drawn.pop(0)


def run(name, magnitude, rng=None, image=NOISE):
  picture = PIL.Image.fromarray(image)
  result = randaugment.OPERATIONS[name](picture, magnitude / 10, rng or Fixed())
  return np.asarray(result)


def pillow(function, *arguments):
  return np.asarray(function(PIL.Image.fromarray(NOISE), *arguments))


def enhanced(name):
  kind = getattr(ImageEnhance, name.capitalize())
  return lambda image, factor: kind(image).enhance(factor)


def moved(source):
  """The pixel at x, y comes from source(x + 1/2, y + 1/2); grey outside."""
  result = np.full(SHAPE, 128, np.uint8)
  for y in range(SHAPE[0]):
    for x in range(SHAPE[1]):
      column, row = (int(np.floor(c)) for c in source(x + 0.5, y + 0.5))
      if 0 <= row < SHAPE[0] and 0 <= column < SHAPE[1]:
        result[y, x] = NOISE[row, column]
  return result


@pytest.mark.parametrize(
  ('name', 'function', 'arguments'),
  [
    ('autocontrast', ImageOps.autocontrast, {0: (), 30: ()}),
    ('equalize', ImageOps.equalize, {0: (), 30: ()}),
    ('invert', ImageOps.invert, {0: (), 30: ()}),
    ('posterize', ImageOps.posterize, {0: (1,), 5: (2,), 15: (6,), 30: (8,)}),
    ('solarize', ImageOps.solarize, {5: (128,), 10: (256,), 15: (384,)}),
    *(
      (name, enhanced(name), {0: (0.1,), 5: (1.0,), 10: (1.9,), 15: (2.8,)})
      for name in ('color', 'contrast', 'brightness', 'sharpness')
    ),
  ],
)
def test_operations_of_pillow(name, function, arguments):
  for magnitude, given in arguments.items():
    expected = pillow(function, *given)
    np.testing.assert_array_equal(run(name, magnitude), expected)


@pytest.mark.parametrize('sign', [1, -1])
@pytest.mark.parametrize('magnitude', [3, 15])
def test_motions(sign, magnitude):
  rng, level = Fixed(0.4 if sign > 0 else 0.6), magnitude / 10
  shear = sign * 0.3 * level
  across, down = (sign * 100 / 224 * level * side for side in (40, 24))
  for name, source in {
    'shear_x': lambda x, y: (x + shear * y, y),
    'shear_y': lambda x, y: (x, y + shear * x),
    'translate_x': lambda x, y: (x + across, y),
    'translate_y': lambda x, y: (x, y + down),
  }.items():
    np.testing.assert_array_equal(run(name, magnitude, rng), moved(source))
  picture = PIL.Image.fromarray(NOISE)
  rotated = picture.rotate(sign * 3.0 * magnitude, fillcolor=(128,) * 3)
  np.testing.assert_array_equal(run('rotate', magnitude, rng), rotated)


def test_cutout_and_solarize_add():
  expected = NOISE.copy()
  # Half of the sides: 40 * 40 / 224 and 40 * 24 / 224, rounded.
  expected[16:24, 0:10] = 128
  before = NOISE.copy()
  np.testing.assert_array_equal(run('cutout', 10, Fixed(0, 3, 20)), expected)
  np.testing.assert_array_equal(NOISE, before)
  added = NOISE.astype(int) + 165
  expected = np.where(NOISE < 128, added.clip(max=255), NOISE)
  np.testing.assert_array_equal(run('solarize_add', 15), expected)


@pytest.mark.parametrize('name', randaugment.OPERATIONS)
def test_results_are_images_of_the_same_size(name):
  for magnitude in (0, 15, 30):
    rng = np.random.default_rng(magnitude)
    for image in (NOISE, np.full((1, 1, 3), 7, np.uint8)):
      result = run(name, magnitude, rng, image)
      assert result.shape == image.shape
      assert result.dtype == np.uint8
  same = np.array_equal(run(name, 0, np.random.default_rng(0)), NOISE)
  assert same == (name in UNCHANGED_AT_0)


def test_it_follows_crop_and_flip_and_is_deterministic():
  names = 'inception_crop', 'flip', 'randaugment'
  augmented, plain = (
    image_ops.Preparation(image_size=16, augment=some, randaugment=(2, 15))
    for some in (names, names[:2])
  )
  seen = set()
  for index in range(30):
    key, rng = (0, 1, index), order.record_rng(0, 1, index)
    result = augmented.transform(NOISE, order.record_rng(*key))
    again = augmented.transform(NOISE, order.record_rng(*key))
    np.testing.assert_array_equal(result, again)
    expected = plain.transform(NOISE, rng)
    expected = randaugment.rand_augment(expected, rng, 2, 15)
    np.testing.assert_array_equal(result, expected)
    seen.add(result.tobytes())
  assert len(seen) > 25
  evaluated = augmented.transform(NOISE)
  np.testing.assert_array_equal(evaluated, plain.transform(NOISE))
