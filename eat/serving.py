"""The gathered form: a chain of stages in which shapes really shrink.

A stage runs up to a head. Pruned tokens are cropped away at static sizes, and
rows that the head is sure of leave before the next stage. Of the block under a
head only [CLS] is computed, a sixth of the block; for rows that stay the next
stage begins with its other tokens, from the same keys and values.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from eat import cost
from eat.model import EatClassifier
from eat.pruning import Tokens
from model_lib.attention import KeysValues
from serve_lib.text_items import padded

PRUNED, FULL = 'pruned', 'full'


class EatChain:
  """An `EatClassifier` as `serve_lib.chain.Chain`.

  Attributes:
    model: the classifier.
    variables: its variables, on the device.
    heads: the layer at which each stage ends.
    num_stages: number of stages.
    variants: 'pruned' as the model is configured, and 'full', which keeps all
      tokens (for sources that must not lose any; `with_full=False` compiles
      it only for models that prune nothing).
    pad_id: token id of padding.
  """

  def __init__(
    self,
    model: EatClassifier,
    variables: Mapping[str, Any],
    pad_id: int = 0,
    with_full: bool = True,
  ):
    self.model = model
    self.variables = variables
    self.heads = model.heads()
    self.num_stages = len(self.heads)
    self.variants: tuple[str, ...] = (FULL,)
    if any(model.prune_ratios):
      self.variants = (PRUNED, FULL) if with_full else (PRUNED,)
    self.pad_id = pad_id

  def stage(
    self, index: int, variant: str, length: int
  ) -> Callable[[Any, Any], tuple[Any, dict[str, Any]]]:
    """The pure function of a stage; see `serve_lib.chain.Chain`.

    Outputs are `'logits'` float32 `[B, O]` of the stage's head and `'kept'`
    int32 `[B]`, the valid tokens at its end.
    """
    sizes = self.sizes(variant, length)

    def run(module: EatClassifier, carry: Any):
      return _stage(module, carry, index, sizes)

    def stage(variables: Any, carry: Any) -> Any:
      return self.model.apply(variables, carry, method=run)

    return stage

  def sizes(self, variant: str, length: int) -> tuple[int, ...]:
    """Static sequence lengths after each pruning; none for 'full'."""
    if variant == FULL:
      return ()
    return cost.static_sizes(self.model, length)

  def example(self, length: int, rows: int) -> dict[str, np.ndarray]:
    """Inputs of the first stage, for compiling."""
    return self.pad([], length, rows)

  def pad(
    self, rows: Sequence[Mapping[str, Any]], length: int, size: int
  ) -> dict[str, Int[np.ndarray, '...']]:
    """Rows of tokens as one batch; see `serve_lib.text_items.padded`."""
    return padded(rows, length, size, self.pad_id)


def _stage(
  module: EatClassifier, carry: Any, index: int, sizes: tuple[int, ...]
) -> tuple[tuple[Tokens, KeysValues], dict[str, Any]]:
  heads = module.heads()
  if index == 0:
    tokens = module.embed(
      carry['tokens'], carry['token_types'], carry['length']
    )
    first, keys_values = 1, None
  else:
    (tokens, keys_values), first = carry, heads[index - 1]
  layer = heads[index]
  tokens = module.encode(
    tokens, first, layer - 1, sizes=sizes, keys_values=keys_values
  ).tokens
  cls, keys_values = module.cls_after(tokens, layer)
  outputs = {'logits': module.classify(cls, layer), 'kept': tokens.length}
  return (tokens, keys_values), outputs
