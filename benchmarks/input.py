"""Times reading and cropping JPEG files, against tf.data and PyTorch.

  python -m benchmarks.input --root=DIRECTORY

Ours reads a folder of images, TFRecord and ArrayRecord shards of the same
bytes. tf.data (`decode_and_crop_jpeg`, AUTOTUNE) and PyTorch (Pillow, a process
for each core) are what a user would write. Each call takes a fresh stream.
"""

import dataclasses
import functools
import itertools
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval

from benchmarks import command
from benchmarks.timing import Call, Candidate
from core.errors import ConfigError
from core.fields import flag
from dataset_lib import builder, image_folder, image_ops
from dataset_lib.records import sharded
from launch.command_line import Positive

BATCH = 64  # images
NOTE = 'images per second of all cores'
_SHARD = 'train-00000-of-00001'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command.Timing):
  root: str = flag('folder with train/CLASS/*.jpg', metavar='DIRECTORY')
  image_size: Positive = flag('side of the crops, in pixels', 224)
  images: Annotated[int, Interval(ge=BATCH)] = flag('images of a call', 2048)
  rounds: Positive = flag('timed rounds', 5, names=command.ROUNDS)


def cases(flags: Any) -> Iterator[tuple[dict[str, Any], list[Candidate]]]:
  """Yields the candidates; raises ConfigError for fewer images than a batch."""
  if (count := len(_files(flags.root))) < BATCH:
    expected = f'a folder with {BATCH} or more files train/CLASS/*.jpg'
    raise ConfigError('root', f'{flags.root} with {count}', expected)
  with tempfile.TemporaryDirectory() as folder:
    _write_shards(flags.root, pathlib.Path(folder))
    configs = {'folder': dict(name='folder', root=flags.root)} | {
      kind: dict(name='records', directory=f'{folder}/{kind}',
                 num_classes=2**16, max_labels=0)
      for kind in ('tfrecord', 'array_record')
    }  # fmt: skip
    readers: dict[str, tuple[Any, Any]] = {
      **{f'ours, {name}': (_ours, config) for name, config in configs.items()},
      'tf.data, folder': (_tf, flags.root),
      'PyTorch and Pillow, folder': (_torch, flags.root),
    }
    size = flags.image_size, flags.images
    candidates = [
      Candidate(
        name, functools.partial(read, data, *size), read.__name__,
        is_baseline=read is _tf, throughput='images/s',
      )
      for name, (read, data) in readers.items()
    ]  # fmt: skip
    yield {'cores': builder.default_num_threads()}, candidates


def _files(root: str) -> list[str]:
  return sorted(map(str, pathlib.Path(root, 'train').glob('*/*.jp*g')))


def _write_shards(root: str, folder: pathlib.Path) -> None:
  """Writes the training images as one shard of each format."""
  from array_record.python import array_record_module
  from tensorflow_datasets.proto import tf_example_pb2

  for kind in ('tfrecord', 'array_record'):
    (folder / kind).mkdir()
  arrays = array_record_module.ArrayRecordWriter(
    str(folder / f'array_record/{_SHARD}.array_record'), 'group_size:1'
  )
  with (folder / f'tfrecord/{_SHARD}.tfrecord').open('wb') as file:
    for path in _files(root):
      example = tf_example_pb2.Example()
      feature = example.features.feature
      data = pathlib.Path(path).read_bytes()
      feature['image/encoded'].bytes_list.value.append(data)
      feature['image/class/label'].int64_list.value.append(0)
      data = example.SerializeToString()
      arrays.write(data)
      file.write(sharded.framed(data))
  arrays.close()


def _call(batches: Callable[[], Iterator[Any]], images: int) -> Call:
  """Returns a call that takes a number of images from a fresh stream."""

  def run() -> None:
    stream = batches()
    for _ in range(images // BATCH):
      assert len(next(stream)) == BATCH

  return Call(run, rows=images // BATCH * BATCH)


def _ours(config: Mapping[str, Any], size: int, images: int) -> Call:
  options = dict(image_size=size, augment=('inception_crop', 'flip'))
  data = builder.build(
    dict(config) | options, split='train', train=True, seed=0, batch_size=BATCH
  )
  return _call(lambda: (batch['image'] for batch in data.batches()), images)


def _tf(root: str, size: int, images: int) -> Call:
  import tensorflow as tf

  tf.config.set_visible_devices([], 'GPU')

  def read(path: Any) -> Any:
    data = tf.io.read_file(path)
    begin, extent, _ = tf.image.sample_distorted_bounding_box(
      tf.io.extract_jpeg_shape(data), tf.zeros([0, 0, 4]),
      area_range=(image_folder.ImageFolder.min_crop_area, 1.0),
      min_object_covered=0,
      use_image_if_no_bounding_boxes=True,
    )  # fmt: skip
    box = tf.stack([*tf.unstack(begin)[:2], *tf.unstack(extent)[:2]])
    image = tf.io.decode_and_crop_jpeg(data, box, channels=3)
    image = tf.image.resize(image, (size, size))
    return tf.cast(tf.image.random_flip_left_right(image), tf.uint8)

  files = _files(root)
  data = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files)).repeat()
  data = data.map(read, tf.data.AUTOTUNE, deterministic=True)
  data = data.batch(BATCH, drop_remainder=True).prefetch(2)
  return _call(lambda: data.as_numpy_iterator(), images)


def _decoded(size: int, files: Sequence[str]) -> Any:
  """Returns a batch of crops with Pillow, for a worker of PyTorch."""
  import torch
  from PIL import Image

  rng, images = np.random.default_rng(), []
  for file in files:
    with Image.open(file) as opened:
      top, left, rows, columns = image_ops.inception_box(
        opened.height, opened.width, rng, image_folder.ImageFolder.min_crop_area
      )
      box = left, top, left + columns, top + rows
      way = Image.Resampling.BILINEAR
      image = opened.convert('RGB').resize((size, size), way, box)
    if rng.random() < 0.5:
      image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    images.append(np.asarray(image))
  return torch.from_numpy(np.stack(images))


def _torch(root: str, size: int, images: int) -> Call:
  from torch.utils import data

  files: Any = _files(root)
  loader = data.DataLoader(
    files, BATCH, shuffle=True, drop_last=True,
    num_workers=builder.default_num_threads(),
    collate_fn=functools.partial(_decoded, size),
  )  # fmt: skip
  repeated = itertools.chain.from_iterable
  return _call(lambda: repeated(itertools.repeat(loader)), images)


main = command.timed('input', __doc__, Flags, cases, note=NOTE)

if __name__ == '__main__':
  raise SystemExit(main())
