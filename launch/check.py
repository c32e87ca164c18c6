"""Checks a configuration, its model and its task on four rows; trains nothing.

  python -m launch.check --config=configs/adatape/parity.py

For a model of your own (docs/adding_a_model.md). Each mistake is a line with
its fix, and the exit code is 2. Without one a table has shapes, FLOPs, and the
names of parameters for `optimizer.scales` and `phases.0.trainable`. Rows are of
the data or, where these are not on this machine, random. Runs in float32 on one
device.
"""

import contextlib
import dataclasses
import functools
import sys
from typing import Any

import numpy as np

from core.errors import MissingDataError
from core.fields import flag
from launch import command_line
from launch.command_line import Positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  """Flags of a check."""

  config: str = flag('the experiment', metavar='FILE.py[:argument]')
  overrides: tuple[str, ...] = command_line.overrides_flag()
  classes: Positive = flag('classes of a folder or of TFDS without data', 10)


def run(flags: Flags) -> None:
  """Prints a table, or raises Mistakes."""
  config = command_line.load_config(flags.config, flags.overrides)
  from eval_lib.report import print_table
  from train_lib import model_check

  rows = model_check.ROWS
  with config.unlocked():
    config.dtype, config.mesh = 'float32', dict(data=1, fsdp=1, tensor=1)
    config.batch_size = rows * config.num_micro
  info, batch, origin = read(config, rows, flags.classes)
  tell = functools.partial(print, file=sys.stderr, flush=True)
  table = {'data': origin, **model_check.check(config, info, batch, tell)}
  lines = [{'checked': k, 'found': v} for k, v in table.items()]
  print_table(f'{flags.config}: no mistake', lines)


def read(config: Any, rows: int, classes: int) -> tuple[Any, Any, str]:
  """Returns the info of the data, a batch, and where it is from."""
  from dataset_lib import builder

  data, split = config.dataset, config.train_split
  with contextlib.suppress(MissingDataError):
    opened = builder.build(
      data, split=split, train=True, seed=config.seed, batch_size=rows,
      num_threads=0, is_checked=True,
    )  # fmt: skip
    with contextlib.closing(opened.batches()) as batches:
      return opened.info, next(batches), f'{rows} rows of {split!r}'
  info, shapes = builder.sketch(data, split, classes, rows)
  ids = info.vocab_size or config.model.get('vocab_size', 2)
  limits = {info.input_key: 256 if info.input_dtype == 'uint8' else ids}
  limits |= {'label': max(info.num_classes, 2), 'token_types': 1}
  draw, batch = np.random.default_rng(config.seed), {}
  for name, (shape, dtype) in shapes.items():
    values = draw.integers(0, limits.get(name, 1), (rows, *shape))
    batch[name] = values.astype(dtype)
  ones = {'mask': 1, 'length': info.input_shape[0]}
  batch |= {k: np.full_like(batch[k], v) for k, v in ones.items() if k in batch}
  return info, batch, 'random rows: the data are not on this machine'


main = command_line.Command('check', __doc__, Flags, run)

if __name__ == '__main__':
  sys.exit(main())
