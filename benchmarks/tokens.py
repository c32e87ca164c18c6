"""Times ViTs with fewer tokens: pruned, merged (ToMe), and ToMe in PyTorch.

  python -m benchmarks.tokens --results=benchmarks/results/vit_tokens.csv

A pruned ViT keeps the share `keep` of its tokens after each of layers 3, 6 and
9. A merged one merges in every layer as many tokens as bring its FLOPs nearest
to those of the pruned one. Random images and weights, equal in all candidates;
`difference` of the logits is the largest one from ours.
"""

import csv
import dataclasses
import functools
import io
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jax
import numpy as np
from annotated_types import Interval
from flax import linen as nn

from benchmarks import command, tome
from benchmarks.timing import Call, Candidate
from core import files
from core.fields import flag
from eval_lib import report
from launch.command_line import Positive
from model_lib.vit import ViT

LAYERS = (3, 6, 9)
KINDS = {
  'ours': 'ViT', 'pruned': 'pruned', 'merged': 'merged (ToMe)',
  'torch': 'PyTorch', 'torch merged': 'ToMe in PyTorch',
}  # fmt: skip
TITLES = (
  'model', 'keep', 'candidate', 'GFLOPs', 'images/s', 'speed-up', 'FLOP ratio'
)  # fmt: skip
Keep = Annotated[float, Interval(gt=0.0, lt=1.0)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command.Timing):
  """Flags of this command."""

  variants: tuple[str, ...] = flag('sizes of the ViT', ('Ti/16', 'S/16'))
  keep: tuple[Keep, ...] = flag('shares of tokens kept', (0.9, 0.7, 0.5))
  batch: Positive = flag('images per call', 8, names='--batch --batch_size')
  image_size: Positive = flag('side of the square images, in pixels', 224)
  peers: Literal['torch', 'none'] = flag('also time PyTorch', 'torch')
  results: command.File = flag('writes the table of the docs here', '')


def cases(flags: Any) -> Iterator[tuple[Any, list[Candidate]]]:
  """Yields labels and candidates, a case for each variant."""
  shape = flags.batch, flags.image_size, flags.image_size, 3
  for variant in flags.variants:
    dense = ViT(1000, variant)
    found = [_candidate('ours', dense, None, shape, flags, is_baseline=True)]
    merged = []
    for keep in flags.keep:
      ratios = (round(1 - keep, 4),) * len(LAYERS)
      pruned = ViT(1000, variant, prune_layers=LAYERS, prune_ratios=ratios)
      merged.append((keep, _merged(dense, pruned.flops(shape[1:]), shape[1:])))
      found.append(_candidate('pruned', pruned, keep, shape, flags))
    for keep, model in merged:
      found.append(_candidate('merged', model, keep, shape, flags))
    if flags.peers == 'torch':
      found.append(_candidate('torch', dense, None, shape, flags))
      for keep, model in merged:
        found.append(_candidate('torch merged', model, keep, shape, flags))
    yield {'variant': variant}, found


def _merged(dense: ViT, flops: float, image: tuple[int, ...]) -> ViT:
  """Returns the ViT that merges in every layer, of the nearest FLOPs."""
  layers = tuple(range(1, (dense.depth or 0) + 1))
  models = [
    dense.clone(merge_layers=layers, merge_count=count)
    for count in range(1, dense.image_tokens(image) // 2)
  ]
  return min(models, key=lambda one: abs(one.flops(image) - flops))


def _candidate(
  kind: str, model: ViT, keep: Any, shape: Any, flags: Any, **fields: Any
) -> Candidate:
  name = kind if keep is None else f'{kind} {keep:g}'
  prepare = _torch if kind.startswith('torch') else _ours
  return Candidate(
    name,
    functools.partial(prepare, model.clone(dtype=flags.dtype), shape),
    process='torch' if prepare is _torch else '',
    flops=model.flops(shape[1:]),
    group=name.replace('torch merged', 'merged').replace('torch', 'ours'),
    throughput='images_per_second',
    columns={'kind': kind, 'keep': keep, 'merge_count': model.merge_count},
    **fields,
  )


def _inputs(model: ViT, shape: Any) -> tuple[Any, Any]:
  """Returns random parameters and images."""
  images = jax.random.normal(jax.random.key(0), shape)
  init = jax.jit(model.init)(jax.random.key(1), images[:1])
  return nn.unbox(init)['params'], images


def _ours(model: ViT, shape: Any) -> Call:
  params, images = _inputs(model, shape)
  forward = jax.jit(lambda p, x: model.apply({'params': p}, x)[0])
  run = functools.partial(forward, params, images)
  return Call(run, shape[0], run())


def _torch(model: ViT, shape: Any) -> Call:
  params, images = _inputs(model, shape)
  run = functools.partial(tome.build(model, params), np.array(images))
  return Call(run, shape[0], run())


def results(rows: report.Rows) -> str:
  """Returns the table of the docs as CSV."""
  file = io.StringIO()
  writer = csv.writer(file, lineterminator='\n')
  writer.writerow(TITLES)
  for row in rows:
    speed, ratio = row['images_per_second'], row['speedup']
    writer.writerow([
      row['variant'], row['keep'] or '', KINDS[row['kind']],
      f'{row["flops"] / 1e9:.2f}', f'{speed.median:.1f}',
      f'{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]',
      f'{row["limit"]:.2f}',
    ])  # fmt: skip
  return file.getvalue()


def _write(flags: Any, rows: report.Rows) -> None:
  if flags.results:
    files.write_text(flags.results, results(rows))


main = command.timed('tokens', __doc__, Flags, cases, then=_write)

if __name__ == '__main__':
  sys.exit(main())
