"""Shapes of a data set without its data, to compile for another machine.

What only the data know, as the number of classes of a folder, is given; the
rest is `Source.sketch`. Data that are generated are opened: they read nothing.
"""

from typing import Any, NamedTuple

from dataset_lib import builder
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
  kind = builder.source_class(config['name'])
  info, more = kind.sketch(config, classes, examples)
  rows = {
    info.input_key: (info.input_shape, info.input_dtype),
    'label': (info.label_shape, info.label_dtype),
  }
  rows |= more | {'mask': ((), 'float32'), 'index': ((), 'int32')}
  return Sketch(info, rows)
