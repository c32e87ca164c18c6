"""How many iterations which tokens take, and how their states converge.

What the paper looks at (Simoulin and Crabbe 2021, section 4.1): mean iterations
by kind of token (Table 1), and the cosine of a token's states before and after
each iteration (Figures 2 to 4); `albert_act.treebank` has the other tables. The
mean of the tokens and the depth that is executed for their row stand beside
each other always: a row that waits for its last token saves nothing.

A token that has halted keeps its state, so that its cosine is 1 and the mean
over all tokens goes to 1 whatever the parameters are. Only that of the tokens
that still run says something about a fixed point, with two cautions: halting
chooses which ones are left, so that their share stands beside it, and a small
weight `lambda^n` brings two states together as well.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from albert_act import token_kinds
from albert_act.encoder import Albert

INPUTS = ('tokens', 'token_types', 'length')
_TINY = 1e-12


@dataclasses.dataclass
class Moments:
  """Mean and standard deviation of numbers that come in parts.

  Attributes:
    count: how many.
    total: their sum.
    squares: the sum of their squares.
  """

  count: Any = 0.0
  total: Any = 0.0
  squares: Any = 0.0

  def add(self, values: np.ndarray) -> None:
    """Adds numbers along the first axis."""
    values = np.asarray(values, np.float64)
    self.count = self.count + len(values)
    self.total = self.total + values.sum(0)
    self.squares = self.squares + np.square(values).sum(0)

  @property
  def mean(self) -> Any:
    """The mean; NaN of nothing."""
    return np.divide(self.total, self.count) if self.count else np.nan

  @property
  def std(self) -> Any:
    """The population's standard deviation; NaN of nothing."""
    if not self.count:
      return np.nan
    return np.sqrt(np.maximum(self.squares / self.count - self.mean**2, 0.0))


@dataclasses.dataclass
class Findings:
  """What a pass over some rows found.

  Attributes:
    iterations: by kind of token.
    depth: of the rows: iterations until the last token has halted.
    similarity: by kind of token, `[N]`: cosine of the states before and after
      each iteration; 1 for a token that has halted.
    running: the same of the tokens that had not halted before the iteration,
      by kind of token, N `Moments`.
    max_iterations: N.
  """

  iterations: dict[str, Moments]
  depth: Moments
  similarity: dict[str, Moments]
  running: dict[str, list[Moments]]
  max_iterations: int


def traced(model: Albert, variables: Any, batch: Mapping[str, Array]) -> Any:
  """(iterations int32 `[B, L]`, similarity float32 `[N, B, L]`) of rows.

  To be jitted. Similarities are those of `cosine`.
  """
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
  """Cosine of the angle between vectors, float32; that of equal ones is 1."""
  x, y = x.astype(jnp.float32), y.astype(jnp.float32)
  product = (x * y).sum(-1)
  lengths = jnp.square(x).sum(-1) * jnp.square(y).sum(-1)
  return product * jax.lax.rsqrt(jnp.maximum(lengths, _TINY))


def analyse(
  model: Albert, variables: Any, batches: Iterable[Mapping[str, Any]]
) -> Findings:
  """One pass over batches of `dataset_lib`, with or without masked words.

  Args:
    model: its masked form; a `dynamic` one has no trace.
    variables: its variables.
    batches: see `token_kinds.masks`.
  """
  limit = model.sizes().max_iterations
  found = Findings(
    {kind: Moments() for kind in token_kinds.KINDS},
    Moments(),
    {kind: Moments() for kind in token_kinds.KINDS},
    {kind: [Moments() for _ in range(limit)] for kind in token_kinds.KINDS},
    limit,
  )
  run = jax.jit(lambda variables, batch: traced(model, variables, batch))
  masks = jax.jit(token_kinds.masks)
  for batch in batches:
    arrays = {name: jnp.asarray(value) for name, value in batch.items()}
    steps, similarity = jax.device_get(run(variables, arrays))
    for kind, mask in jax.device_get(masks(arrays)).items():
      found.iterations[kind].add(steps[mask])
      found.similarity[kind].add(similarity[:, mask].T)
      for n, moments in enumerate(found.running[kind]):
        moments.add(similarity[n][mask & (steps > n)])
    real = np.asarray(batch['mask']) > 0
    found.depth.add(steps.max(1)[real])
  return found


def token_iterations(
  model: Albert, variables: Any, batches: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Int[np.ndarray, 'B L']]]:
  """Each batch with the iterations of its tokens, 0 for padding."""
  run = jax.jit(lambda variables, batch: traced(model, variables, batch)[0])
  for batch in batches:
    arrays = {name: jnp.asarray(batch[name]) for name in INPUTS}
    yield batch, np.asarray(run(variables, arrays))
