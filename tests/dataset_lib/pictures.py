"""Images made here, encoded, and options of the image operations."""

import cv2
import numpy as np

from dataset_lib import image_ops

RNG = np.random.default_rng(0)
NOISE = RNG.integers(256, size=(20, 30, 3)).astype(np.uint8)  # RGB


def options(image_size=8, resize_small=0, **fields):
  return image_ops.ImageOptions(
    image_size=image_size, resize_small=resize_small, **fields
  )


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
  done, data = cv2.imencode(extension, bgr, list(flags))
  assert done
  return data.tobytes()
