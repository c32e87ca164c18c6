"""Sizes after pruning and FLOPs of an EAT's stages, by formula."""

from collections.abc import Sequence
from typing import Any

from eat import pruning
from eat.window_attention import window_scores
from model_lib import flops


def static_sizes(model: Any, length: int) -> tuple[int, ...]:
  """Returns the static sequence lengths after each of `model.prune_layers`."""
  sizes = []
  for ratio in model.prune_ratios:
    length = pruning.static_size(length, float(ratio), model.min_tokens)
    sizes.append(length)
  return tuple(sizes)


def stage_flops(
  model: Any, length: int, sizes: Sequence[int], count_cls: bool = False
) -> list[float]:
  """Returns the FLOPs of one row in each stage, from one head to the next.

  Window attention counts the scores that are computed: those of the blocks, or
  all of a row that is too short for blocks. With `count_cls` as the chain
  computes: [CLS], keys and values of the block before a head, and its other
  tokens in the next stage; else every block in full before its head, as papers
  do. `sizes` are the tokens after each pruning.
  """
  width = model.width
  head = flops.dense(1, width, width + model.num_classes)
  totals, total = [], 0.0
  for layer in range(1, model.depth + 1):
    block = _block_flops(model, length)
    if layer not in model.heads():
      total += block
    elif count_cls:
      alone = flops.cls_block(length, width, model.mlp_dim)
      totals.append(total + alone + head)
      # [CLS] is computed again with the others; keys and values are not.
      total = block - flops.dense(length, width, 2 * width)
    else:
      totals.append(total + block + head)
      total = 0.0
    if sizes and layer in model.prune_layers:
      length = sizes[list(model.prune_layers).index(layer)]
  return totals


def _block_flops(model: Any, tokens: int) -> float:
  """Returns the FLOPs of a block, of its attention the computed scores."""
  block = flops.block(tokens, model.width, model.mlp_dim)
  if not model.window:
    return block
  scores = window_scores(tokens, model.window, model.window_implementation)
  return block + 4.0 * model.width * (scores - tokens**2)
