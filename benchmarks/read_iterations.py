"""Iterations by kind of token, and the convergence of their states.

Simoulin and Crabbe (2021), section 4.1. A halted token keeps its state and has
cosine 1, so the mean over all tokens goes to 1 for any parameters. Only the
mean over running tokens can show a fixed point. Halting selects these tokens,
so their share is reported too. A small `lambda^n` also makes consecutive states
similar.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from albert_act.encoder import Albert
from albert_act.token_kinds import KINDS, masks
from halting import loop

INPUTS = ('tokens', 'token_types', 'length')
DEPTH = 'executed depth of a row'
# Labels of the axes of the curves over the iterations, and the suffixes of
# their columns.
CURVES = {
  'cosine, all tokens': '',
  'cosine, still running': ' running',
  'share still running': ' share',
}
# A batch, the iterations of its tokens, and cosines `[N, B, L]`.
Traced = tuple[Mapping[str, Any], Int[np.ndarray, 'B L'], Any]


class Analysis(NamedTuple):
  """The result of a pass over rows; kinds without tokens are left out.

  `iterations` has (count, mean, standard deviation) of each kind of token, and
  of the rows as `DEPTH`; `curves` by the names in `CURVES`, then by kind, a
  value for each iteration, NaN of no tokens.
  """

  iterations: dict[str, tuple[int, float, float]]
  curves: dict[str, dict[str, Float[np.ndarray, ' N']]]


def traced(
  model: Albert, variables: Any, rows: Iterable[Mapping[str, Any]]
) -> Iterator[Traced]:
  """Yields (batch, iterations, cosines); padding has 0 iterations.

  A cosine is that of the states before and after an iteration, 1 for a halted
  token. A `dynamic` model has no trace.
  """

  def cosine(visit: loop.Visit) -> Array:
    x, y = (s.astype(jnp.float32) for s in (visit.before, visit.after))
    return optax.losses.cosine_similarity(x, y, epsilon=1e-12)

  @jax.jit
  def run(variables: Any, *inputs: Array) -> Any:
    encoded: Any = model.apply(
      variables, *inputs, trace=cosine, method='encode'
    )
    steps = encoded.ponder['steps']
    # By some rules the state goes on after a token has halted.
    running = jnp.arange(model.max_iterations)[:, None, None] < steps[None]
    return steps, jnp.where(running, encoded.trace, 1.0)

  for batch in rows:
    inputs = (jnp.asarray(batch[name]) for name in INPUTS)
    yield batch, *jax.device_get(run(variables, *inputs))


def analyse(
  model: Albert, variables: Any, rows: Iterable[Mapping[str, Any]]
) -> Analysis:
  """Analyses batches, see `masks` and `traced`."""
  limit, find, sums = model.max_iterations, jax.jit(masks), np.zeros(())
  for batch, steps, cosines in traced(model, variables, rows):
    flags = jax.device_get(find(dict(batch)))
    # Mark the first deepest token of each row.
    deepest = np.arange(steps.shape[1]) == steps.argmax(1)[:, None]
    flags[DEPTH] = deepest & flags['all']
    running = np.arange(limit)[:, None, None] < steps
    moments = np.ones_like(steps), steps, np.square(steps)
    values = [*moments, *cosines, *(running * cosines), *running]
    tokens = [flags[kind] for kind in (*KINDS, DEPTH)]
    sums = sums + np.einsum('kbl,vbl->kv', tokens, values, dtype=np.float64)
  result = Analysis({}, {name: {} for name in CURVES})
  for kind, row in zip((*KINDS, DEPTH), sums, strict=True):
    count, total, squares = row[:3].tolist()
    if not count:
      continue
    mean = total / count
    std = max(squares / count - mean**2, 0.0) ** 0.5
    result.iterations[kind] = int(count), mean, std
    similar, still, share = row[3:].reshape(3, limit) / count
    with np.errstate(invalid='ignore'):
      lines = similar, still / share, share
    for curve, line in zip(result.curves.values(), lines, strict=True):
      if kind != DEPTH:
        curve[kind] = line
  return result
