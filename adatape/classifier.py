"""What AdaTape's classifiers share: read the tape, then classify with it."""

from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float, Key, Num

from adatape.tape import Tape
from model_lib.logical import constrain


class TapeClassifier(nn.Module):
  """Base of the classifiers; `__call__` is `read`, then `classify`.

  A subclass has a field `max_steps` (the most tape tokens, T), sets up
  `encoder` (a `TapeEncoder`) and `head`, and defines `embed`. `row_keys`, one
  for each row, turn on training's noise.
  """

  def embed(self, inputs: Num[Array, 'B ...']) -> tuple[Array, Array]:
    """Input tokens `[B, L, H]` and the bank `[C, H]` or `[B, C, H]`."""
    raise NotImplementedError

  def read(
    self,
    inputs: Num[Array, 'B ...'],
    row_keys: Key[Array, ' B'] | None = None,
    stop_early: bool = False,
  ) -> tuple[Float[Array, 'B L H'], Tape, int]:
    """Everything up to the insertion: tokens, the tape, size of the bank.

    With `stop_early` reading stops when every row has halted.
    """
    x, bank = self.embed(inputs)
    x, tape = self.encoder.read(x, bank, row_keys, stop_early)
    return x, tape, bank.shape[-2]

  def classify(
    self,
    x: Float[Array, 'B L H'],
    tokens: Float[Array, 'B T H'],
    mask: Float[Array, 'B T'],
    row_keys: Key[Array, ' B'] | None = None,
  ) -> tuple[Float[Array, 'B O'], Float[Array, 'B H']]:
    """Everything from the insertion on: logits and features, both float32.

    The tape may be cropped.
    """
    features = self.encoder.finish(x, tokens, mask, row_keys)
    return constrain(self.head(features), 'batch', 'classes'), features

  def __call__(
    self,
    inputs: Num[Array, 'B ...'],
    row_keys: Key[Array, ' B'] | None = None,
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies with all T tape slots: training, and the reference.

    Returns:
      (logits, out): `out['features']` are the pre-logits `[B, H]`,
      `out['tape']` has length `[B]`, mask `[B, T]`, indices `[B, T, K]`, loss
      `[B]` and bank_size.
    """
    x, tape, bank_size = self.read(inputs, row_keys)
    logits, features = self.classify(x, tape.tokens, tape.mask, row_keys)
    names = ('length', 'mask', 'indices', 'loss')
    out = {name: getattr(tape, name) for name in names}
    return logits, {
      'features': features,
      'tape': out | {'bank_size': bank_size},
    }
