"""The form that saves: tokens leave the computation, rows leave the batch.

Each stage runs a few iterations with exact compaction
(`albert_act.compaction`); the first also embeds, the others are one program.
After a stage the rows in which every token has halted are answered, and the
others go on in a smaller batch (`serve_lib.engine`). With as many iterations as
the model has there is one stage; a row that is done costs nothing in it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from albert_act import compaction, products
from albert_act.compaction import Tokens
from albert_act.model import AlbertClassifier
from serve_lib.text_items import padded

VARIANT = 'compacted'


class AlbertChain:
  """An `AlbertClassifier` that halts, as `serve_lib.chain.Chain`.

  Attributes:
    model: the classifier.
    variables: its parameters as `products.transposed`, on the device.
    iterations: iterations in a stage.
    num_stages: number of stages.
    variants: the one form it is served in.
    pad_id: token id of padding.

  Raises:
    ValueError: the model does not halt, or has more than one shared block: the
      tokens that have halted would have to be computed for the next one.
  """

  def __init__(
    self,
    model: AlbertClassifier,
    variables: Mapping[str, Any],
    pad_id: int = 0,
    iterations: int = 12,
  ):
    if not model.halting:
      raise ValueError(
        "halting: expected 'act' or 'straight_through', as a fixed depth saves "
        "nothing, got ''"
      )
    for name in ('num_groups', 'inner_group'):
      if getattr(model, name) != 1:
        raise ValueError(
          f'{name}: expected 1 to be served, got {getattr(model, name)}'
        )
    if iterations < 1:
      raise ValueError(f'iterations: expected at least 1, got {iterations}')
    self.model, self.pad_id = model, pad_id
    self.variables = {'params': products.transposed(variables['params'])}
    self.iterations = iterations
    self.num_stages = -(-model.sizes().max_iterations // iterations)
    self.variants = (VARIANT,)
    # One object for all stages but the first: it is then compiled once.
    self._later = self._applied(self._iterate)

  def stage(
    self, index: int, variant: str, length: int
  ) -> Callable[[Any, Any], tuple[Any, dict[str, Any]]]:
    """The pure function of a stage; see `serve_lib.chain.Chain`.

    Outputs are `'logits'` float32 `[B, O]`, `'running'` bool `[B]`, whether a
    token of the row has not halted, and `'steps'` int32 `[B, L]`.
    """
    return self._later if index else self._applied(self._first_stage)

  def _first_stage(self, module: AlbertClassifier, carry: Any) -> Any:
    tokens = compaction.begin(
      module, carry['tokens'], carry['token_types'], carry['length']
    )
    return self._iterate(module, tokens)

  def _iterate(self, module: AlbertClassifier, tokens: Tokens) -> Any:
    sizes = compaction.sizes_for(*tokens.valid.shape)
    tokens = compaction.iterate(module, tokens, self.iterations, sizes)
    logits, _ = module.classify(tokens.x[:, 0])
    running, steps = tokens.halting.running.any(1), tokens.halting.steps
    return tokens, {'logits': logits, 'running': running, 'steps': steps}

  def _applied(self, run: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda variables, carry: self.model.apply(
      variables, carry, method=run
    )

  def example(self, length: int, rows: int) -> dict[str, np.ndarray]:
    """Inputs of the first stage, for compiling."""
    return self.pad([], length, rows)

  def pad(
    self, rows: Sequence[Mapping[str, Any]], length: int, size: int
  ) -> dict[str, Int[np.ndarray, '...']]:
    """Rows of tokens as one batch; see `serve_lib.text_items.padded`.

    Padding rows have no token here, so that they halt before they begin.
    """
    batch = padded(rows, length, size, self.pad_id)
    batch['length'][len(rows) :] = 0
    return batch
