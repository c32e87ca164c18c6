"""What an EAT costs, by formula: sizes after pruning, FLOPs of the stages."""

from collections.abc import Sequence
from typing import Any

from eat import pruning
from eat.window_attention import window_scores
from model_lib import flops


def static_sizes(model: Any, length: int) -> tuple[int, ...]:
  """The static sequence lengths after each of `model.prune_layers`.

  Args:
    model: an `EatClassifier`.
    length: tokens of a row before the first pruning.
  """
  sizes = []
  for ratio in model.prune_ratios:
    length = pruning.static_size(length, float(ratio), model.min_tokens)
    sizes.append(length)
  return tuple(sizes)


def stage_flops(
  model: Any, length: int, sizes: Sequence[int], count_cls: bool = False
) -> list[float]:
  """FLOPs of one row in each stage: from one head to the next.

  Of attention in a window, what is computed counts: in blocks, and for a row
  that is too short for blocks all scores.

  Args:
    model: an `EatClassifier`.
    length: tokens of the row at the start.
    sizes: tokens after each pruning; empty for none.
    count_cls: count what the chain computes: of the block under a head [CLS],
      keys and values, and in the next stage the rest; False counts every block
      in full, before its head, which is the limit that papers state.
  """
  shape = model.sizes()
  width = shape.width
  head = flops.dense(1, width, width + model.num_classes)
  totals, total = [], 0.0
  for layer in range(1, shape.depth + 1):
    block = _block_flops(model, length)
    if layer not in model.heads():
      total += block
    elif count_cls:
      alone = flops.cls_block(length, width, shape.mlp_dim)
      totals.append(total + alone + head)
      # [CLS] runs with the others once more, keys and values do not.
      total = block - flops.dense(length, width, 2 * width)
    else:
      totals.append(total + block + head)
      total = 0.0
    if sizes and layer in model.prune_layers:
      length = sizes[list(model.prune_layers).index(layer)]
  return totals


def _block_flops(model: Any, tokens: int) -> float:
  """FLOPs of a block, with the scores that its attention really computes."""
  shape = model.sizes()
  block = flops.block(tokens, shape.width, shape.mlp_dim)
  if not model.window:
    return block
  scores = window_scores(tokens, model.window, model.window_implementation)
  return block + 4.0 * shape.width * (scores - tokens**2)
