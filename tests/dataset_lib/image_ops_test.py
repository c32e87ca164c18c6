"""Decoding, resizing and augmentation, against hand-made cases and JAX."""

import io
import struct
import zlib

import cv2
import jax
import numpy as np
import PIL.Image
import pytest

from core.errors import BadRecord
from dataset_lib import image_header, image_ops, order
from serve_lib.chain import InputError
from serve_lib.items import ImageReader

RNG = np.random.default_rng(0)
NOISE = RNG.integers(256, size=(20, 30, 3)).astype(np.uint8)  # RGB


def options(image_size=8, **fields):
  return image_ops.Preparation(image_size=image_size, **fields)


def cropping(image_size=8, **fields):
  return options(image_size, augment=('inception_crop',), **fields)


def smooth(height, width):
  """A smooth RGB image, so that resampling methods agree on it."""
  y = np.linspace(0, 255, height)[:, None]
  x = np.linspace(255, 0, width)[None, :]
  channels = np.broadcast_arrays(y, x, (x + y) / 2)
  return np.stack(channels, axis=-1).astype(np.uint8)


def encode(image, extension='.png', *flags):
  bgr = image if image.ndim == 2 else image[..., ::-1]
  return cv2.imencode(extension, bgr, list(flags))[1].tobytes()


GREY = np.repeat(NOISE[..., :1], 3, axis=2)
LARGE = np.random.default_rng(1).bytes(1680000)  # a PNG of more than 1 MiB
LARGE = np.frombuffer(LARGE, np.uint8).reshape(700, 800, 3)
ALPHA = np.dstack([NOISE, np.full((20, 30), 7, np.uint8)])
JPEG = encode(NOISE, '.jpg')
ZEROS = zlib.compress(bytes(2**22))


def by_pillow(image, **options):
  file = io.BytesIO()
  image.save(file, 'JPEG', quality=95, **options)
  return file.getvalue()


def with_scans(count, size=(20, 30)):
  """A progressive JPEG whose last scan is repeated."""
  data = by_pillow(PIL.Image.new('L', size[::-1]), progressive=True)
  scan = data[data.rindex(b'\xff\xda') : -2]
  return data[:-2] + scan * count + data[-2:]


def with_chunks(kind, content, count=1):
  """A PNG with more chunks after its header."""
  chunk = struct.pack('>I', len(content)) + kind + content
  chunk += struct.pack('>I', zlib.crc32(kind + content))
  data = encode(NOISE)
  return data[:33] + chunk * count + data[33:]


@pytest.mark.parametrize(
  ('data', 'expected'),
  [
    (encode(NOISE), NOISE),
    (encode(LARGE), LARGE),
    (encode(NOISE[..., 0]), GREY),
    (NOISE[..., :1], GREY),
    (encode(NOISE.astype(np.uint16) * 257), NOISE),
    (cv2.imencode('.png', ALPHA[..., [2, 1, 0, 3]])[1].tobytes(), NOISE),
  ],
)
def test_images_become_rgb_of_eight_bits(data, expected):
  np.testing.assert_array_equal(image_ops.to_rgb(data), expected)


def test_jpegs_are_close_to_their_origin():
  image = PIL.Image.fromarray(smooth(40, 60))
  for mode in ('RGB', 'CMYK'):
    decoded = image_ops.decode(by_pillow(image.convert(mode))).astype(int)
    assert np.abs(decoded - smooth(40, 60)).max() < 12


def test_a_few_scans_count_once():
  data = with_scans(320)
  assert image_header.count_pixels(data) == 600 * 20  # 326 / 16
  assert image_ops.decode(data).shape == (20, 30, 3)
  with pytest.raises(BadRecord, match='20 x 30 pixels in 3'):
    image_ops.decode(data, max_pixels=600 * 19)
  for mode in ('RGB', 'CMYK'):
    image = PIL.Image.fromarray(NOISE).convert(mode)
    data = by_pillow(image, progressive=True)
    assert image_header.count_pixels(data) == 600


@pytest.mark.parametrize(
  ('data', 'kind'),
  [
    (b'', 'empty'),
    (b'this is a text file', 'undecodable'),
    *((JPEG[:end], 'truncated') for end in (-1, 300, 10)),
    *((encode(NOISE)[:end], 'truncated') for end in (-40, 40)),
    (b'\xff\xd8\xff\xd9', 'undecodable'),
    (with_scans(100, (4000, 4000)), 'too_many_pixels'),
    (with_chunks(b'iCCP', b'a\0\0' + zlib.compress(bytes(9)), 65),
     'undecodable'),
    (with_chunks(b'IDAT', ZEROS + bytes(2**20)), 'undecodable'),
    (encode(NOISE, '.tiff'), 'undecodable'),
    *((value, 'wrong_dtype') for value in
      (NOISE.astype(np.float32), NOISE.astype(int), 'text', None)),
    *((value, 'wrong_shape') for value in
      (NOISE[..., 0], NOISE[..., :2], NOISE[:0])),
  ],
)  # fmt: skip
def test_what_is_no_image(data, kind):
  with pytest.raises(BadRecord) as error:
    image_ops.to_rgb(data)
  assert error.value.kind == kind
  if isinstance(data, bytes):
    with pytest.raises(BadRecord):
      cropping().transform(data, RNG)


UPRIGHT = {
  2: 'FLIP_LEFT_RIGHT', 3: 'ROTATE_180', 4: 'FLIP_TOP_BOTTOM', 5: 'TRANSPOSE',
  6: 'ROTATE_270', 7: 'TRANSVERSE', 8: 'ROTATE_90',
}  # fmt: skip


@pytest.mark.parametrize(
  ('kind', 'form'), [(3, 'H2x'), (4, 'I'), (9, 'i'), (8, 'h2x')]
)
@pytest.mark.parametrize('order', ['>', '<'])
def test_every_kind_of_orientation_is_read_once(kind, form, order):
  """Crops and whole images agree, in size and orientation."""
  image = PIL.Image.fromarray(smooth(24, 40))
  plain = by_pillow(image)
  for turn in range(1, 9):
    exif = (b'MM' if order == '>' else b'II') + struct.pack(order + 'HI', 42, 8)
    exif += struct.pack(f'{order}HHHI{form}I', 1, 0x0112, kind, 1, turn, 0)
    app = b'Exif\0\0' + exif
    size = struct.pack('>H', len(app) + 2)
    data = plain[:2] + b'\xff\xe1' + size + app + plain[2:]
    whole = image_ops.decode(data)
    expected = PIL.Image.fromarray(image_ops.decode(plain))
    if turn in UPRIGHT:
      expected = expected.transpose(PIL.Image.Transpose[UPRIGHT[turn]])
    np.testing.assert_array_equal(whole, expected)
    assert image_ops.jpeg_size(data) == whole.shape[:2]
    assert cropping(min_crop_area=0.5).transform(data, RNG).shape == (8, 8, 3)


@pytest.mark.parametrize(
  ('name', 'shape'),
  [('exif_long.jpg', (24, 16)), ('motion_photo.jpg', (16, 16))],
)
@pytest.mark.parametrize('rng', [None, RNG])
def test_photos_of_the_cases(shared_data, name, shape, rng):
  data = shared_data('..', 'cases', 'images', name).read_bytes()
  assert image_ops.decode(data).shape[:2] == shape
  assert cropping().transform(data, rng).shape == (8, 8, 3)
  assert ImageReader(1, 8, 0).read(data, '').inputs['image'].shape == (8, 8, 3)


def test_any_bytes_may_follow_the_end():
  rng, expected = np.random.default_rng(0), image_ops.decode(JPEG)
  for length in (1, 2, 50, 10_000):
    for end in (b'', b'\xff\xda', b'\xff\xd8\xff\xda', b'\xff\xd9'):
      for _ in range(10):
        data = JPEG + rng.bytes(length) + end + rng.bytes(3)
        np.testing.assert_array_equal(image_ops.decode(data), expected)
  with pytest.raises(BadRecord, match='JPEG ends'):
    image_ops.decode(JPEG[: len(JPEG) // 2] + b'\xff\xfe\0\4\xff\xd9')


@pytest.mark.parametrize('ending', ['.jpg', '.png', '.webp', '.bmp'])
def test_a_field_raises_the_limit_of_pixels(ending):
  data = encode(NOISE, ending)
  assert options(max_pixels=600).transform(data).shape == (8, 8, 3)
  for small in (options(max_pixels=599), cropping(max_pixels=599)):
    for rng in (None, RNG):
      with pytest.raises(BadRecord, match='max_pixels allows more') as error:
        small.transform(data, rng)
      assert error.value.kind == 'too_many_pixels'
  with pytest.raises(InputError, match='too_many_pixels'):
    ImageReader(1, 8, 0, 599).read(data, '')
  assert options().max_pixels == 2**28 // 3  # 89 megapixels


DAMAGED_EXIF = b'\xff\xe1\x00\x10Exif\0\0II' + b'\xff' * 6


@pytest.mark.parametrize(
  'data',
  [
    JPEG,
    JPEG[:2] + DAMAGED_EXIF + JPEG[2:],
    encode(NOISE, '.jpg', cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    encode(NOISE, '.jpg', cv2.IMWRITE_JPEG_RST_INTERVAL, 1),
  ],
)
def test_every_cut_through_the_pixels_is_a_truncation(data):
  assert image_ops.jpeg_size(data) in ((20, 30), None)
  # The end of a thumbnail is not the end.
  thumbnail = encode(NOISE[:8, :8], '.jpg')
  size = (len(thumbnail) + 2).to_bytes(2, 'big')
  data = data[:2] + b'\xff\xe1' + size + thumbnail + data[2:]
  image_ops.decode(data)
  for cut in range((len(data) + len(thumbnail)) // 2, len(data)):
    with pytest.raises(BadRecord, match='JPEG ends'):
      image_ops.decode(data[:cut])


@pytest.mark.parametrize('shape', [(33, 41), (14, 25), (20, 15)])
def test_resize_is_bilinear(shape):
  resized = image_ops.resize(NOISE, *shape)
  pixels = NOISE.astype(np.float32)
  expected = jax.image.resize(pixels, (*shape, 3), 'linear', antialias=False)
  assert np.abs(resized - expected).max() <= 1.0


def test_strong_shrinking_averages():
  resized = image_ops.resize(NOISE, 5, 10)
  means = NOISE.reshape(5, 4, 10, 3, 3).mean(axis=(1, 3))
  assert np.abs(resized - means).max() <= 0.51
  assert image_ops.resize(NOISE, 20, 30) is NOISE


@pytest.mark.parametrize('shape', [(1, 3000), (3000, 1), (1, 1), (64, 300)])
def test_evaluation_of_extreme_shapes(shape):
  image = np.full((*shape, 3), 9, np.uint8)
  result = options(image_size=32).transform(image)
  np.testing.assert_array_equal(result, np.full((32, 32, 3), 9))


def test_evaluation_frames_the_centre():
  image = np.zeros((64, 192, 3), np.uint8)
  image[:, 64:128] = 200
  for short_side in (0, 40):
    result = options(28, resize_small=short_side).transform(encode(image))
    np.testing.assert_array_equal(result, np.full((28, 28, 3), 200))


def test_inception_boxes_cover_the_legal_range():
  rng = np.random.default_rng(1)
  size = height, width = 300, 400
  boxes = [image_ops.inception_box(*size, rng, 0.08) for _ in range(2000)]
  tops, lefts, heights, widths = np.array(boxes).T
  assert tops.min() == lefts.min() == 0
  assert (tops + heights).max() <= height
  assert (lefts + widths).max() <= width
  areas, ratios = heights * widths / (height * width), widths / heights
  assert 0.075 < areas.min() < 0.1
  assert areas.max() > 0.9
  assert 0.72 < ratios.min() < 0.77
  assert 1.3 < ratios.max() < 1.36
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
  reductions, real = [], image_ops._reduction

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
  given = options(30, resize_small=30, augment=('flip',))
  plain, rng = given.transform(NOISE), order.record_rng(0)
  images = np.stack([given.transform(NOISE, rng) for _ in range(200)])
  is_flipped = (images == plain[:, ::-1]).all((1, 2, 3))
  assert ((images == plain).all((1, 2, 3)) != is_flipped).all()
  assert 70 < is_flipped.sum() < 130
