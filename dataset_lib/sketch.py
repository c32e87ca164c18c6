"""Shapes of a data set without its data, to compile for another machine.

What only the data know, as the number of classes of a folder, is given. Data
that are generated are opened: they read nothing.
"""

import math
from typing import Any, NamedTuple

from dataset_lib import builder, text_tasks
from dataset_lib.source import DatasetInfo

_PLACES = {'root', 'directory', 'data_dir'}  # fields of data in files


class Sketch(NamedTuple):
  """A data set's description, and shapes and dtypes of a row of its batches."""

  info: DatasetInfo
  rows: dict[str, tuple[tuple[int, ...], str]]


def sketch(config: Any, split: str, classes: int, examples: int) -> Sketch:
  """Describes a data set; rows of texts have the greatest length.

  Args:
    config: validated fields of the data set.
    split: name of the split, of generated data.
    classes: of a data set whose fields do not tell.
    examples: records of the split.
  """
  if not _PLACES & {*config}:
    data = builder.build(
      config, split=split, train=True, seed=0, batch_size=1, num_threads=0
    )
    return Sketch(data.info, data.row_shapes())
  if config.get('image_size') is not None:
    size, classes = config['image_size'], config.get('num_classes', classes)
    info = DatasetInfo(
      'image', (size, size, 3), 'uint8', classes, (), examples,
      max_labels=config.get('max_labels', 0),
    )  # fmt: skip
  else:
    length, task = config['max_length'], text_tasks.GLUE.get(config.get('task'))
    if config['name'] == 'pretraining':
      classes = 2
    info = DatasetInfo(
      'tokens', (length,), 'int32', task.num_classes if task else classes,
      task.class_names if task else (), examples,
      label_dtype='float32' if task and task.is_regression else 'int32',
    )  # fmt: skip
  rows: dict[str, tuple[tuple[int, ...], str]] = {
    info.input_key: (info.input_shape, info.input_dtype),
    'label': (info.label_shape, info.label_dtype),
  }
  if info.input_key == 'tokens':
    rows |= {
      'token_types': (info.input_shape, 'int32'),
      'length': ((), 'int32'),
    }
  if config['name'] == 'tags':
    rows |= {'label': (info.input_shape, 'int32'), 'left_out': ((), 'int32')}
  if share := config.get('mask_share'):
    slots = (math.ceil(share * config['max_length']),)
    names = dict.fromkeys(('positions', 'labels', 'kind'), 'int32')
    for name, dtype in (names | {'weights': 'float32'}).items():
      rows[f'mlm_{name}'] = slots, dtype
  return Sketch(info, rows | {'mask': ((), 'float32'), 'index': ((), 'int32')})
