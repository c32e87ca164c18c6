"""Times ViTs with fewer tokens: pruned, merged (ToMe), and ToMe in PyTorch.

  python -m benchmarks.tokens --results=benchmarks/results/vit_tokens.csv

A pruned ViT keeps the share `keep` of its tokens after each of layers 3, 6 and
9. A merged one has the nearest FLOPs, with equally many merged in every layer.
Random images and weights, equal in all candidates; `difference` of the logits
is the largest one from ours.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np
from flax import linen as nn

from benchmarks import command, tome
from benchmarks.timing import Call, Candidate
from core.fields import flag
from eval_lib import report
from launch.command_line import Positive
from model_lib.vit import ViT

LAYERS = (3, 6, 9)
KINDS = {
  'ours': 'ViT', 'pruned': 'pruned', 'merged': 'merged (ToMe)',
  'torch': 'PyTorch', 'torch merged': 'ToMe in PyTorch',
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command.Timing):
  variants: tuple[str, ...] = flag('sizes of the ViT', ('Ti/16', 'S/16'))
  keep: tuple[command.Share, ...] = flag(
    'shares of tokens kept', (0.9, 0.7, 0.5)
  )
  batch: Positive = flag('images per call', 8, names='--batch --batch_size')
  image_size: Positive = flag('side of the square images, in pixels', 224)
  peers: Literal['torch', 'none'] = flag('also time PyTorch', 'torch')
  results: command.File = flag('writes the table of the docs here', '')


def cases(flags: Any) -> Iterator[tuple[Any, list[Candidate]]]:
  shape = flags.batch, flags.image_size, flags.image_size, 3
  for variant in flags.variants:
    dense = ViT(1000, variant)
    pruned, merged = dict[Any, ViT](), dict[Any, ViT]()
    for keep in flags.keep:
      ratios = (round(1 - keep, 4),) * len(LAYERS)
      model = ViT(1000, variant, prune_layers=LAYERS, prune_ratios=ratios)
      pruned[keep] = model
      merged[keep] = _merged(dense, model.flops(shape[1:]), shape[1:])
    kinds = {'ours': {None: dense}, 'pruned': pruned, 'merged': merged}
    if flags.peers == 'torch':
      kinds |= {'torch': {None: dense}, 'torch merged': merged}
    yield (
      {'variant': variant},
      [
        _candidate(kind, model, keep, shape, flags)
        for kind, models in kinds.items()
        for keep, model in models.items()
      ],
    )


def _merged(dense: ViT, flops: float, image: tuple[int, ...]) -> ViT:
  """Returns the ViT that merges in every layer, of the nearest FLOPs."""
  layers = tuple(range(1, (dense.depth or 0) + 1))
  models = [
    dense.clone(merge_layers=layers, merge_count=count)
    for count in range(1, dense.image_tokens(image) // 2)
  ]
  return min(models, key=lambda model: abs(model.flops(image) - flops))


def _candidate(
  kind: str, model: ViT, keep: Any, shape: Any, flags: Any
) -> Candidate:
  name = kind if keep is None else f'{kind} {keep:g}'
  prepare = _torch if kind.startswith('torch') else _ours
  return Candidate(
    name,
    functools.partial(prepare, model.clone(dtype=flags.dtype), shape),
    process='torch' if prepare is _torch else '',
    is_baseline=kind == 'ours',
    flops=model.flops(shape[1:]),
    group=name.replace('torch merged', 'merged').replace('torch', 'ours'),
    throughput='images_per_second',
    columns={'kind': kind, 'keep': keep, 'merge_count': model.merge_count},
  )


def _inputs(model: ViT, shape: Any) -> tuple[Any, Any]:
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


def write_results(flags: Any, rows: report.Rows) -> None:
  """Writes the table of the docs."""
  if flags.results:
    report.write_csv(flags.results, [
      {
        'model': row['variant'], 'keep': row['keep'],
        'candidate': KINDS[row['kind']],
        'GFLOPs': f'{row["flops"] / 1e9:.2f}',
        'images/s': f'{row["images_per_second"].median:.1f}',
        'speed-up': '{:.2f} [{:.2f}, {:.2f}]'.format(*row['speedup']),
        'FLOP ratio': f'{row["limit"]:.2f}',
      }
      for row in rows
    ])  # fmt: skip


main = command.timed('tokens', __doc__, Flags, cases, then=write_results)

if __name__ == '__main__':
  sys.exit(main())
