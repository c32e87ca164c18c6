"""Our ViT in plain PyTorch, with ToMe as its authors' code computes it.

Bolya et al. 2023, github.com/facebookresearch/ToMe: merging between attention
and feed-forward network of every block, proportional attention.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from core import machine
from model_lib.vit import ViT


def build(model: ViT, params: Any) -> Any:
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


def _logits(model: ViT, weights: Mapping[str, Any], images: Any) -> Any:
  import torch
  from torch.nn import functional

  start, encoder = weights['tokens'], weights['encoder']
  x = _linear(start['patch_embed']['projection'], _patches(model, images))
  x = x + start['positions']['embedding']
  x = torch.cat([start['cls'].expand(len(x), -1, -1), x], 1)
  sizes = torch.ones_like(x[..., :1]) if model.merge_count else None
  for index in range(model.depth or 0):
    block = encoder[f'block_{index}']
    normed, attention = _norm(block['attention_norm'], x), block['attention']
    query, key, value = (
      _linear(attention[name], normed)
      .unflatten(-1, (model.num_heads, -1))
      .transpose(1, 2)
      for name in ('query', 'key', 'value')
    )
    bias = None if sizes is None else sizes.log()[:, None, None, :, 0]
    mixed = functional.scaled_dot_product_attention(
      query, key, value, attn_mask=bias
    )
    x = x + _linear(attention['out'], mixed.transpose(1, 2).flatten(2))
    if sizes is not None:
      x, sizes = merged(x, sizes, key.mean(1), model.merge_count)
    hidden = _linear(block['mlp']['hidden'], _norm(block['mlp_norm'], x))
    x = x + _linear(block['mlp']['out'], functional.gelu(hidden))
  return _linear(weights['head'], _norm(encoder['norm'], x)[:, 0])


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


def _patches(model: ViT, images: Any) -> Any:
  rows, height, width, depth = images.shape
  p: Any = model.patch_size
  grid = images.reshape(rows, height // p, p, width // p, p, depth)
  return grid.permute(0, 1, 3, 2, 4, 5).reshape(rows, -1, p * p * depth)


def _linear(weights: Mapping[str, Any], x: Any) -> Any:
  from torch.nn import functional

  return functional.linear(x, weights['kernel'], weights['bias'])


def _norm(weights: Mapping[str, Any], x: Any) -> Any:
  from torch.nn import functional

  scale, bias = weights['scale'], weights['bias']
  return functional.layer_norm(x, x.shape[-1:], scale, bias, 1e-6)
