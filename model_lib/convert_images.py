"""Images that a published ViT was trained on: their pixels and their size.

`(factor * pixel - mean) / std` is affine in the pixels that our models read,
and patches have no padding: kernel and bias of their projection absorb it.
Trained positions are resized bilinearly, with aligned corners and without
antialiasing, as in vit_jax and big_vision.
"""

import functools
import math
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np
from absl import logging
from annotated_types import Interval, MinLen
from jaxtyping import Float

from core import fields, files
from core.errors import ConfigError
from model_lib import convert_files

PROCESSOR, PREPROCESSOR = 'processor_config.json', 'preprocessor_config.json'
# Other options that an image processor may turn on change what it computes.
_KNOWN = (
  'do_rescale', 'do_normalize', 'do_resize', 'do_center_crop', 'do_convert_rgb',
)  # fmt: skip
_Mean = Annotated[float, Interval(gt=-1e6, lt=1e6)]
_Positive = Annotated[float, Interval(gt=0.0, lt=1e6)]
_OFFSETS = ('offset', 'rescale_offset')  # subtract 1 after the factor
# Image processors whose mean and std are 0.5 unless they are stated.
_VITS = ('ViT', 'DeiT')
Sides = tuple[int, int]  # height and width, of which only the ratio matters
SQUARE = (1, 1)
_EMBEDDING = 'positions/embedding'


class Pixels(NamedTuple):
  """A normalisation: one mean and std, or one per channel."""

  mean: tuple[float, ...] = (0.5,)  # of `factor * pixel`
  std: tuple[float, ...] = (0.5,)
  factor: float = 1 / 255


HALF = Pixels()  # inputs in [-1, 1]


def read(directory: pathlib.Path, config: Mapping[str, Any]) -> Pixels:
  """Returns what the files of timm or Hugging Face state, else warns.

  Raises ConfigError for an option that is not an affine map of each channel.
  """
  for file in (directory / PROCESSOR, directory / PREPROCESSOR):
    if file.is_file():
      options = files.read_object(file)
      inner = options.get('image_processor')
      if isinstance(inner, dict):
        return _of_processor(file, inner)
      if file.name == PREPROCESSOR:
        return _of_processor(file, options)
  inner = config.get('pretrained_cfg')
  stated = {**config, **(inner if isinstance(inner, dict) else {})}
  if {'mean', 'std'} & {*stated}:
    where = f'{directory / convert_files.CONFIG}: pretrained_cfg'
    mean, std = (_numbers(where, stated, name) for name in ('mean', 'std'))
    return Pixels(mean, std)
  _warn_of_half(directory)
  return HALF


@functools.cache  # a command reads a checkpoint several times
def _warn_of_half(directory: pathlib.Path) -> None:
  message = '%s states no mean and std of the pixels: taken to be 0.5'
  logging.warning(message, directory)


def fold(
  where: object,
  kernel: Float[np.ndarray, 'P D'],
  bias: Float[np.ndarray, ' D'],
  channels: int,
  theirs: Pixels,
  ours: Pixels,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns kernel and bias for our pixels; channels are the last axis of P."""
  for name, numbers in (('mean', theirs.mean), ('std', theirs.std)):
    if len(numbers) not in (1, channels):
      expected = f'1 number, or {channels}, one for each channel of a patch'
      raise ConfigError(f'{where}: {name}', list(numbers), expected)
  mean, std, our_mean, our_std = map(np.array, (*theirs[:2], *ours[:2]))
  by = theirs.factor / ours.factor
  scale, shift = by * our_std / std, (by * our_mean - mean) / std
  parts = kernel.astype(np.float64).reshape(-1, channels, kernel.shape[-1])
  bias = bias + (parts * shift[:, None]).sum((0, 1))
  kernel = (parts * scale[:, None]).reshape(kernel.shape)
  return kernel.astype(np.float32), bias.astype(np.float32)


def _of_processor(file: pathlib.Path, options: Mapping[str, Any]) -> Pixels:
  for name, value in options.items():
    if value and (
      name in _OFFSETS or (name.startswith('do_') and name not in _KNOWN)
    ):
      raise ConfigError(f'{file}: {name}', value, 'false')
  if not options.get('do_rescale', True):
    expected = 'true: the unit of pixels that are scaled elsewhere is unknown'
    raise ConfigError(f'{file}: do_rescale', False, expected)
  older = options.get('feature_extractor_type', 'ViT')
  preset: dict[str, Any] = {'rescale_factor': HALF.factor}
  if str(options.get('image_processor_type', older)).startswith(_VITS):
    preset |= {'image_mean': 0.5, 'image_std': 0.5}
  if not options.get('do_normalize', True):
    options = {**options, 'image_mean': 0.0, 'image_std': 1.0}
  names = 'image_mean', 'image_std', 'rescale_factor'
  mean, std, factor = (_numbers(file, {**preset, **options}, n) for n in names)
  return Pixels(mean, std, factor[0])


def _numbers(
  where: object, options: Mapping[str, Any], name: str
) -> tuple[float, ...]:
  """Returns a number or a list as a tuple; all but a mean are positive."""
  item: Any = _Mean if 'mean' in name else _Positive
  legal = item | Annotated[tuple[item, ...], MinLen(1)]
  numbers = fields.check_value(f'{where}: {name}', options.get(name), legal)
  return numbers if isinstance(numbers, tuple) else (numbers,)


def grid(count: int, image: Sides) -> Sides | None:
  """Returns rows and columns of square patches, None if they do not fit."""
  patch = math.sqrt(image[0] * image[1] / max(count, 1))
  rows, columns = (round(side / patch) for side in image)
  return (rows, columns) if rows * columns == count else None


def resize(
  saved: Mapping[str, Any], fresh: Mapping[str, Any], old: Sides, new: Sides
) -> dict[str, Any]:
  """Returns the parameters `saved`, with positions as in the model `fresh`.

  Both are by path. Positions are of patches if an embedding of patches is in
  the same module; `old` and `new` are sides of the images.
  """
  resized = dict(saved)
  for name in {*saved} & {*fresh}:
    module = name.removesuffix(_EMBEDDING)
    if module == name or f'{module}patch_embed/projection/kernel' not in fresh:
      continue
    counts = [tree[name].shape[1] for tree in (saved, fresh)]
    grids = [*map(grid, counts, (old, new))]
    if None in grids and counts[0] != counts[1]:
      both = f'{counts[0]} for {counts[1]} patches'
      expected = f'grids of images of the sides {old} and {new}'
      raise ConfigError(name, both, expected)
    if grids[0] != grids[1]:
      logging.warning('%s: resized from %s to %s patches', name, *grids)
      resized[name] = _zoom(np.asarray(saved[name]), *grids)
  return resized


def _zoom(
  positions: Float[np.ndarray, '1 L D'], old: Any, new: Any
) -> Float[np.ndarray, '1 K D']:
  import scipy.ndimage  # slow to import

  by = *np.divide(new, old), 1
  # 'nearest' differs from vit_jax only if rounding leaves the grid.
  rows = positions.reshape(*old, -1)
  rows = scipy.ndimage.zoom(rows, by, order=1, mode='nearest')
  return rows.reshape(1, new[0] * new[1], -1)
