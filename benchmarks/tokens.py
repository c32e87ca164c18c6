"""Times ViTs with fewer tokens: pruned, merged (ToMe), and ToMe in PyTorch.

  python -m benchmarks.tokens --results=benchmarks/results/vit_tokens.csv

A pruned ViT keeps the share `keep` of its tokens after each of layers 3, 6 and
9. A merged one has the nearest FLOPs, with equally many merged in every layer.
Random images and weights, equal in all candidates; `difference` of the logits
is the largest one from ours. ToMe in PyTorch is as its authors' code computes
it: Bolya et al. 2023, github.com/facebookresearch/ToMe.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np
from flax import linen as nn

from benchmarks import command
from benchmarks.timing import Call, Candidate
from core import machine
from core.fields import flag
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
    candidates = [
      _candidate(kind, model, keep, shape, flags)
      for kind, models in kinds.items()
      for keep, model in models.items()
    ]
    yield {'variant': variant}, candidates


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
  return Candidate(
    name,
    functools.partial(_prepare, kind, model.clone(dtype=flags.dtype), shape),
    process='torch' if kind.startswith('torch') else '',
    is_baseline=kind == 'ours',
    flops=model.flops(shape[1:]),
    group=name.replace('torch merged', 'merged').replace('torch', 'ours'),
    throughput='images_per_second',
    columns={'kind': kind, 'keep': keep, 'merge_count': model.merge_count},
  )


def _prepare(kind: str, model: ViT, shape: Any) -> Call:
  """Prepares a ViT of ours, or the same in PyTorch, for random images."""
  images = jax.random.normal(jax.random.key(0), shape)
  init = jax.jit(model.init)(jax.random.key(1), images[:1])
  params = nn.unbox(init)['params']
  if kind.startswith('torch'):
    run = functools.partial(_in_torch(model, params), np.array(images))
  else:
    forward = jax.jit(lambda p, x: model.apply({'params': p}, x)[0])
    run = functools.partial(forward, params, images)
  return Call(run, shape[0], run())


def _in_torch(model: ViT, params: Any) -> Any:
  """Returns a function of images `[B, H, W, 3]` to logits, both of NumPy."""
  import torch

  torch.set_num_threads(machine.cores())

  def tensor(leaf: Any) -> Any:
    array = np.asarray(leaf)
    return torch.from_numpy(np.array(array.T if array.ndim == 2 else array))

  weights = jax.tree.map(tensor, params)

  @torch.inference_mode()
  def classify(images: Any) -> np.ndarray:
    return _logits(model, weights, torch.from_numpy(images)).numpy()

  return classify


def _logits(model: Any, weights: Mapping[str, Any], images: Any) -> Any:
  import torch
  from torch.nn import functional

  def linear(params: Any, x: Any) -> Any:
    return functional.linear(x, params['kernel'], params['bias'])

  def norm(params: Any, x: Any) -> Any:
    return functional.layer_norm(
      x, x.shape[-1:], params['scale'], params['bias'], 1e-6
    )

  start, encoder = weights['tokens'], weights['encoder']
  (rows, height, _, depth), p = images.shape, model.patch_size
  grid = images.reshape(rows, height // p, p, -1, p, depth)
  patches = grid.permute(0, 1, 3, 2, 4, 5).reshape(rows, -1, p * p * depth)
  x = linear(start['patch_embed']['projection'], patches)
  x = x + start['positions']['embedding']
  x = torch.cat([start['cls'].expand(len(x), -1, -1), x], 1)
  sizes = torch.ones_like(x[..., :1]) if model.merge_count else None
  for index in range(model.depth):
    block = encoder[f'block_{index}']
    normed, attention = norm(block['attention_norm'], x), block['attention']
    query, key, value = (
      linear(attention[name], normed)
      .unflatten(-1, (model.num_heads, -1))
      .transpose(1, 2)
      for name in ('query', 'key', 'value')
    )
    bias = None if sizes is None else sizes.log()[:, None, None, :, 0]
    mixed = functional.scaled_dot_product_attention(query, key, value, bias)
    x = x + linear(attention['out'], mixed.transpose(1, 2).flatten(2))
    if sizes is not None:
      x, sizes = merged(x, sizes, key.mean(1), model.merge_count)
    hidden = linear(block['mlp']['hidden'], norm(block['mlp_norm'], x))
    x = x + linear(block['mlp']['out'], functional.gelu(hidden))
  return linear(weights['head'], norm(encoder['norm'], x)[:, 0])


def merged(x: Any, sizes: Any, metric: Any, count: int) -> tuple[Any, Any]:
  """Merges `count` pairs of tokens; returns tokens and sizes `[B, S, 1]`."""
  import torch

  count = min(count, (x.shape[1] - 1) // 2)
  metric = metric / metric.norm(dim=-1, keepdim=True)
  scores = metric[:, ::2] @ metric[:, 1::2].transpose(1, 2)
  scores[:, 0] = -torch.inf  # [CLS]
  near, hosts = scores.max(-1)
  order = near.argsort(-1, descending=True)[..., None]
  left, gone = order[:, count:].sort(1)[0], order[:, :count]
  hosts = hosts[..., None].gather(1, gone)

  def summed(values: Any) -> Any:
    even, odd = values[:, ::2], values[:, 1::2]
    width = (-1, -1, values.shape[-1])
    stays = even.gather(1, left.expand(*width))
    joins = even.gather(1, gone.expand(*width))
    odd = odd.scatter_reduce(1, hosts.expand(*width), joins, 'sum')
    return torch.cat([stays, odd], 1)

  total = summed(sizes)
  return summed(x * sizes) / total, total


def documented(row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a row of the table of the docs."""
  return {
    'model': row['variant'], 'keep': row['keep'],
    'candidate': KINDS[row['kind']], 'GFLOPs': f'{row["flops"] / 1e9:.2f}',
    'images/s': f'{row["images_per_second"].median:.1f}',
    'speed-up': '{:.2f} [{:.2f}, {:.2f}]'.format(*row['speedup']),
    'FLOP ratio': f'{row["limit"]:.2f}',
  }  # fmt: skip


main = command.timed('tokens', __doc__, Flags, cases, documented=documented)

if __name__ == '__main__':
  raise SystemExit(main())
