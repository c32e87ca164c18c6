"""Times an adaptive run on images against its dense run.

  python -m benchmarks.own_images --workdir=/tmp/photos/adaptive \\
      --dense=/tmp/photos/dense --out=timings.csv

Both answer files of test images in the engine, which decodes them: one at a
time, and all together. The dense run is timed in XLA and, as the adaptive one,
in ONNX Runtime where it is installed.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import command
from benchmarks.timing import Candidate, in_turn
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
  min_seconds: command.Seconds = flag('least time of a round', 0.2)


def answers(engine: Engine, items: Any) -> Any:
  return checked(engine.predict(items))


def cases(flags: Any) -> Iterator[tuple[Any, list[Candidate]]]:
  config = loading.load_config(flags.workdir)
  source = builder.build_source(config.dataset, 'test')
  count = min(flags.rows, len(source))
  rows = np.linspace(0, len(source) - 1, count).round().astype(int)
  items = [source.item(row) for row in rows.tolist()]
  runs: Any = (
    ('dense', flags.dense, {}, 'xla'),
    ('dense', flags.dense, {}, 'auto'),
    ('adaptive', flags.workdir, {'setting': 'guaranteed'}, 'auto'),
  )
  sizes, engines = sorted({1, count}), dict[str, Engine]()
  with contextlib.ExitStack() as stack:
    for name, folder, options, backend in runs:
      served = loading.serve(folder, options=options)
      engine = Engine(*served, sizes, backend=backend)
      engines[f'{name}, {TITLES[engine.backend]}'] = engine
      stack.enter_context(engine)
    for size in sizes:
      candidates = []
      for name, engine in engines.items():
        answer = functools.partial(answers, engine)
        make = functools.partial(in_turn, answer, items, size)
        is_baseline = name.startswith('dense')
        candidates.append(Candidate(name, make, is_baseline=is_baseline))
      yield {'batch': size}, candidates


main = command.timed('own_images', __doc__, Flags, cases)

if __name__ == '__main__':
  raise SystemExit(main())
