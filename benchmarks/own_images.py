"""Times an adaptive run on images beside its dense one.

  python -m benchmarks.own_images --workdir=/tmp/photos/adaptive \\
      --dense=/tmp/photos/dense --out=timings.csv

Both answer files of test images in the engine, which decodes them: one at a
time, and in full batches. The dense run is timed in XLA and in ONNX Runtime.
"""

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import command
from benchmarks.timing import Call, Candidate
from core.errors import ConfigError
from core.fields import flag
from dataset_lib import builder
from launch.command_line import Positive
from serve_lib.chain import checked
from serve_lib.engine import Engine
from train_lib import loading

TITLES = {'xla': 'XLA', 'onnxruntime': 'ONNX Runtime'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command.Timing):
  workdir: str = flag('the adaptive run', metavar='DIRECTORY')
  dense: str = flag('a run of a ViT on the same images', metavar='DIRECTORY')
  rows: Positive = flag('images of the test split, at most', 64)
  batch: Positive = flag('images of a full batch', 32)


def cases(flags: Any) -> Iterator[tuple[Any, list[Candidate]]]:
  config = loading.load_config(flags.workdir)
  source = builder.build_source(config.dataset, 'test')
  count = min(flags.rows, len(source))
  rows = np.linspace(0, len(source) - 1, count).round().astype(int)
  items = [source.item(int(row)) for row in rows]
  certified: Any = {'setting': 'guaranteed'}
  with contextlib.ExitStack() as stack:
    engines = {}
    for backend, title in TITLES.items():
      for name, folder, options in (
        ('dense', flags.dense, {}), ('adaptive', flags.workdir, certified),
      ):  # fmt: skip
        chain, policy, lengths = loading.serve(folder, options=options)
        try:
          engine = Engine(chain, policy, lengths, backend=backend)
        except ConfigError as error:
          print(f'left out: {name}, {title}: {error}')
          continue
        engines[f'{name}, {title}'] = stack.enter_context(engine)
    for size in (1, min(flags.batch, count)):
      yield {'batch': size}, [
        Candidate(
          name, functools.partial(_prepare, engine, items, size),
          is_baseline=name.startswith('dense'),
        )
        for name, engine in engines.items()
      ]  # fmt: skip


def _prepare(engine: Engine, items: Sequence[Any], size: int) -> Call:
  """Returns a call that answers the next `size` images."""
  parts = [items[n : n + size] for n in range(0, len(items), size)]
  parts = [part for part in parts if len(part) == size]
  turns = itertools.cycle(parts)
  return Call(lambda: checked(engine.predict(next(turns))), size)


main = command.timed('own_images', __doc__, Flags, cases)

if __name__ == '__main__':
  sys.exit(main())
