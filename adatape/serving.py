"""The dynamic form: a batch pays for its longest tape, or each row for its own.

The reading stops when every row has halted; the encoder then runs on the
shortest of a few static tape lengths (buckets) that holds the tapes. Logits
are those of the masked form, to float32 rounding.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from adatape.classifier import TapeClassifier, tape_output


class DynamicClassifier:
  """Runs a trained classifier with tapes cropped to their buckets.

  Every bucket is compiled on first use; with `group_rows` once per power of
  two of rows as well. The host waits for the tape lengths of a batch before
  it starts the rest: one transfer of B integers.

  Attributes:
    model: the model.
    buckets: the static tape lengths, ascending; the last is T.
    group_rows: run rows of unlike buckets apart, each with its own, instead
      of the whole batch with the longest. Pays when lengths differ much and
      the batch keeps the device busy.
  """

  def __init__(
    self,
    model: TapeClassifier,
    buckets: Sequence[int] = (),
    group_rows: bool = False,
  ):
    """Jits the two halves of the model.

    Args:
      model: the model.
      buckets: tape lengths to compile for; every second up to T if empty.
      group_rows: see the class.

    Raises:
      ValueError: if a bucket is not an integer in [0, T].
    """
    max_steps = model.max_steps
    buckets = buckets or range(2, max_steps, 2)
    for bucket in buckets:
      if not isinstance(bucket, int) or not 0 <= bucket <= max_steps:
        raise ValueError(
          f'buckets: expected integers in [0, {max_steps}], got {bucket!r}'
        )
    self.model = model
    self.buckets = (*sorted({*buckets} - {max_steps}), max_steps)
    self.group_rows = group_rows
    self._read = jax.jit(
      lambda variables, inputs: model.apply(
        variables, inputs, stop_early=True, method='read'
      )
    )
    self._classify = jax.jit(self._classify_cropped, static_argnums=4)

  def __call__(
    self, variables: Any, inputs: Num[Array, 'B ...']
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies; the same result as `model.apply(variables, inputs)`.

    Args:
      variables: the model's variables, `{'params': ...}`.
      inputs: a batch of images or symbols.
    """
    x, tape, bank_size = self._read(variables, inputs)
    places = np.searchsorted(self.buckets, np.asarray(tape.length))
    if self.group_rows:
      logits, features = self._by_bucket(variables, x, tape, places)
    else:
      bucket = self.buckets[places.max()]
      logits, features = self._classify(
        variables, x, tape.tokens, tape.mask, bucket
      )
    out = {'features': features, 'tape': tape_output(tape, int(bank_size))}
    return logits, out

  def _classify_cropped(self, variables, x, tokens, mask, bucket):
    return self.model.apply(
      variables, x, tokens[:, :bucket], mask[:, :bucket], method='classify'
    )

  def _by_bucket(self, variables, x, tape, places):
    parts, order = [], []
    for place in np.unique(places):
      rows = np.flatnonzero(places == place)
      padded = np.resize(rows, _next_power(len(rows), len(places)))
      some = [array[padded] for array in (x, tape.tokens, tape.mask)]
      part = self._classify(variables, *some, self.buckets[place])
      parts.append([array[: len(rows)] for array in part])
      order.append(rows)
    back = np.argsort(np.concatenate(order))
    return tuple(
      jnp.concatenate(arrays)[back] for arrays in zip(*parts, strict=True)
    )


def _next_power(count: int, limit: int) -> int:
  """The power of two from `count` on, at most `limit`: few shapes compile."""
  return min(1 << (count - 1).bit_length(), limit)
