"""Iterations by kind of token, and the convergence of their states.

Simoulin and Crabbe (2021), section 4.1. A halted token keeps its state, so its
cosine is 1 and the mean over all tokens goes to 1 for any parameters. Only that
of the running tokens says something about a fixed point: halting selects them,
so their share is reported too, and a small `lambda^n` also brings states
together.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from albert_act.encoder import Albert
from dataset_lib.builder import padded
from dataset_lib.source import TokenSource
from eval_lib.metrics import Average
from train_lib.losses import average
from train_lib.task import Batch

BATCH = 64
INPUTS = ('tokens', 'token_types', 'length')
# Replacements of a word to predict, in the order of `mlm_kind` in a batch of
# `dataset_lib.pretraining`.
MASKED = ('mask', 'random', 'original')
# The kinds of tokens of the paper's Table 1.
KINDS = ('all', 'unmasked', *MASKED, 'cls', 'sep')


def masks(batch: Batch) -> dict[str, Bool[Array, 'B L']]:
  """Returns a mask of the tokens of each of `KINDS`, False in padding rows.

  'all' are the real tokens, 'unmasked' those of the text that are not to be
  predicted; a row is [CLS] x1 [SEP] x2 [SEP], or [CLS] x1 [SEP].

  Args:
    batch: with `tokens`, `token_types`, `length`, `mask`, and in pretraining
      `mlm_positions`, `mlm_kind` and `mlm_weights` `[B, P]`.
  """
  rows, size = batch['tokens'].shape
  place, length = jnp.arange(size)[None], batch['length'][:, None]
  real = (place < length) & (batch['mask'] > 0)[:, None]
  # The tokens of the first segment come first, its [SEP] at their end.
  first = ((batch['token_types'] == 0) & real).sum(1, keepdims=True)
  found = {
    'all': real,
    'cls': real & (place == 0),
    'sep': real & ((place == first - 1) | (place == length - 1)),
  }
  predicted = jnp.full((rows, size), -1)
  if 'mlm_kind' in batch:
    places = jnp.where(batch['mlm_weights'] > 0, batch['mlm_positions'], size)
    at = predicted.at[jnp.arange(rows)[:, None], places]
    predicted = at.set(batch['mlm_kind'], mode='drop')
  for number, kind in enumerate(MASKED):
    found[kind] = real & (predicted == number)
  special = found['cls'] | found['sep']
  found['unmasked'] = real & ~special & (predicted < 0)
  return {kind: found[kind] for kind in KINDS}


def means(
  name: str, values: Num[Array, 'B L'], batch: Batch
) -> dict[str, Average]:
  """Returns the mean of a value per token, for each of `KINDS`."""
  return {
    f'{name}_{kind}': average(values, tokens.astype(jnp.float32))
    for kind, tokens in masks(batch).items()
  }


@dataclasses.dataclass
class Moments:
  """Mean and standard deviation of numbers that are added in parts."""

  count: Any = 0  # `[...]`
  total: Any = 0.0  # `[...]`
  squares: Any = 0.0  # `[...]`

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
  """The result of a pass over rows, by kind of token, of N iterations at most.

  `similarity` `[N]` is the cosine of the states before and after each
  iteration, 1 for a halted token; `running` the same without halted tokens.
  """

  iterations: dict[str, Moments]
  depth: Moments  # of the rows: iterations until the last token has halted
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
  return product * jax.lax.rsqrt(jnp.maximum(lengths, 1e-12))


def analyse(
  model: Albert, variables: Any, rows: Iterable[Mapping[str, Any]]
) -> Analysis:
  """Analyses batches, see `masks`; a `dynamic` model has no trace."""
  limit = model.max_iterations
  iterations, similarity, running = (
    {kind: Moments() for kind in KINDS} for _ in range(3)
  )
  depth = Moments()
  run = jax.jit(lambda variables, batch: traced(model, variables, batch))
  find = jax.jit(masks)
  for batch in rows:
    arrays = {name: jnp.asarray(value) for name, value in batch.items()}
    steps, cosines = jax.device_get(run(variables, arrays))
    is_running = np.arange(limit)[:, None, None] < steps
    still = np.where(is_running, cosines, np.nan)
    for kind, mask in jax.device_get(find(arrays)).items():
      iterations[kind].add(steps[mask])
      similarity[kind].add(cosines[:, mask].T)
      running[kind].add(still[:, mask].T)
    depth.add(steps.max(1)[np.asarray(batch['mask']) > 0])
  return Analysis(iterations, depth, similarity, running, limit)


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

  The first rows are no sample: those of a corpus are in the order of its
  documents.

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
