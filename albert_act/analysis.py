"""Iterations of tokens, and the convergence of their states.

Simoulin and Crabbe (2021), section 4.1: mean iterations by kind of token (Table
1), and the cosine of a token's states before and after each iteration (Figures
2 to 4); `albert_act.treebank` has the other tables. The depth executed for a
row is reported too: its last token determines the time.

A token that has halted keeps its state, so its cosine is 1 and the mean over
all tokens goes to 1 for any parameters. Only the mean over the running tokens
says something about a fixed point, with two cautions: halting selects these
tokens, so their share is reported too, and a small weight `lambda^n` also
brings two states together.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from albert_act import token_kinds
from albert_act.encoder import Albert
from dataset_lib.reader import padded
from dataset_lib.source import TokenSource

BATCH = 64
INPUTS = ('tokens', 'token_types', 'length')
_TINY = 1e-12


@dataclasses.dataclass
class Moments:
  """Mean and standard deviation of numbers that are added in parts.

  Attributes:
    count: of the numbers, `[...]`.
    total: their sum, `[...]`.
    squares: the sum of their squares, `[...]`.
  """

  count: Any = 0
  total: Any = 0.0
  squares: Any = 0.0

  def add(self, values: Num[np.ndarray, '...']) -> None:
    """Adds numbers along the first axis; NaN is skipped."""
    values = np.asarray(values, np.float64)
    self.count = self.count + np.isfinite(values).sum(0)
    self.total = self.total + np.nansum(values, 0)
    self.squares = self.squares + np.nansum(np.square(values), 0)

  @property
  def mean(self) -> Any:
    """The mean; NaN of nothing."""
    with np.errstate(invalid='ignore'):
      return np.divide(self.total, self.count)

  @property
  def std(self) -> Any:
    """The population's standard deviation; NaN of nothing."""
    with np.errstate(invalid='ignore'):
      variance = np.divide(self.squares, self.count) - self.mean**2
    return np.sqrt(np.maximum(variance, 0.0))


@dataclasses.dataclass
class Analysis:
  """The result of a pass over some rows; N is the limit of the iterations.

  Attributes:
    iterations: by kind of token.
    depth: of the rows: iterations until the last token has halted.
    similarity: by kind of token, `[N]`: cosine of the states before and after
      each iteration; 1 for a token that has halted.
    running: the same of the tokens that had not halted before the iteration.
    max_iterations: N.
  """

  iterations: dict[str, Moments]
  depth: Moments
  similarity: dict[str, Moments]
  running: dict[str, Moments]
  max_iterations: int


def traced(model: Albert, variables: Any, batch: Mapping[str, Array]) -> Any:
  """Returns iterations int32 `[B, L]` and `cosine` float32 `[N, B, L]`."""
  encoded: Any = model.apply(
    variables,
    *(batch[name] for name in INPUTS),
    trace=lambda before, after, spent: cosine(before, after),
    method='encode',
  )
  return encoded.ponder['steps'], encoded.trace


def cosine(
  x: Float[Array, '... D'], y: Float[Array, '... D']
) -> Float[Array, '...']:
  """Returns the cosine of the angle between vectors, float32."""
  x, y = x.astype(jnp.float32), y.astype(jnp.float32)
  product = (x * y).sum(-1)
  lengths = jnp.square(x).sum(-1) * jnp.square(y).sum(-1)
  return product * jax.lax.rsqrt(jnp.maximum(lengths, _TINY))


def analyse(
  model: Albert, variables: Any, rows: Iterable[Mapping[str, Any]]
) -> Analysis:
  """Analyses batches of `dataset_lib`, with or without masked words.

  Args:
    model: its masked form; a `dynamic` one has no trace.
    variables: its variables.
    rows: batches, see `token_kinds.masks`.
  """
  limit = model.max_iterations

  def by_kind():
    return {kind: Moments() for kind in token_kinds.KINDS}

  found = Analysis(by_kind(), Moments(), by_kind(), by_kind(), limit)
  run = jax.jit(lambda variables, batch: traced(model, variables, batch))
  masks = jax.jit(token_kinds.masks)
  for batch in rows:
    arrays = {name: jnp.asarray(value) for name, value in batch.items()}
    steps, similarity = jax.device_get(run(variables, arrays))
    is_running = np.arange(limit)[:, None, None] < steps
    running = np.where(is_running, similarity, np.nan)
    for kind, mask in jax.device_get(masks(arrays)).items():
      found.iterations[kind].add(steps[mask])
      found.similarity[kind].add(similarity[:, mask].T)
      found.running[kind].add(running[:, mask].T)
    found.depth.add(steps.max(1)[np.asarray(batch['mask']) > 0])
  return found


def token_iterations(
  model: Albert, variables: Any, rows: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Int[np.ndarray, 'B L']]]:
  """Yields each batch with the iterations of its tokens, 0 for padding."""
  run = jax.jit(lambda variables, batch: traced(model, variables, batch)[0])
  for batch in rows:
    arrays = {name: jnp.asarray(batch[name]) for name in INPUTS}
    yield batch, np.asarray(run(variables, arrays))


def batches(
  records: Any, seed: int, count: int
) -> Iterator[dict[str, np.ndarray]]:
  """Yields batches of rows of similar length, from all parts of a split.

  Rows of different lengths are evaluated from the shortest, and rows of a
  corpus are in the order of its documents: the first ones are no sample.

  Args:
    records: a source of rows of tokens.
    seed: of the run, for sources that draw their rows.
    count: of rows, at most all; they have even distances in the split.
  """
  rows = len(records)
  count = min(count, rows)
  chosen = np.arange(count, dtype=np.int64) * rows // max(count, 1)
  if isinstance(records, TokenSource):
    chosen = chosen[np.argsort(records.lengths[chosen], kind='stable')]
  size = max(1, min(BATCH, count))
  for start in range(0, count, size):
    part = chosen[start : start + size]
    if hasattr(records, 'draw'):
      arrays = records.draw(seed, np.zeros_like(part), part)
    else:
      arrays = records.records(part)
    yield padded(arrays, part, size)
