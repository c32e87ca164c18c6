"""ALBERT that halts timed against fixed depth.

Used by `launch.benchmark`. One device, random tokens. With random parameters
the halting score is set so that the tokens take a given share of the iterations
on average; what is timed depends on which tokens halt when, not on why.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from albert_act import packed_attention, transposed_kernels
from albert_act.model import AlbertClassifier
from albert_act.serving import VARIANT, AlbertChain
from eval_lib import timing
from serve_lib.chain import Encoded
from serve_lib.engine import Engine

VOCAB_SIZE = 1000
SPREAD = 2.0  # standard deviation of the first scores' logits
DENSE = ('fixed, scanned', 'fixed, unrolled')
# Fixed depth with the engine's products, activation and division of attention:
# what these give without halting.
ENGINE_FORMS = "fixed, engine's forms"
FIXED = (*DENSE, ENGINE_FORMS)


@dataclasses.dataclass(frozen=True)
class Settings:
  """What is timed, and how often.

  Attributes:
    variant: of `sizes.ALBERT`.
    length: tokens of a row.
    batches: rows at a time.
    shares: mean iterations over the most.
    iterations: of a stage of the engine.
    dtype: compute dtype.
    repeats: rounds that count.
    warmup: rounds before them.
  """

  variant: str = 'small'
  length: int = 128
  batches: Sequence[int] = (1, 8)
  shares: Sequence[float] = (0.42, 0.25)
  iterations: int = 12
  dtype: str = 'float32'
  repeats: int = 10
  warmup: int = 2


@dataclasses.dataclass(frozen=True)
class Row:
  """One timed form of one setting.

  Attributes:
    batch: rows at a time.
    what: name of the form.
    mean_share: mean iterations over the most, as measured.
    depth_share: executed depth of the rows over the most.
    seconds: of one call.
    speed_up: over the best of `DENSE`.
    limit: the speed-up that FLOPs allow; None for a fixed depth.
    difference: largest difference of its logits to the masked form's; of a
      fixed depth to those of the first one.
  """

  batch: int
  what: str
  mean_share: float
  depth_share: float
  seconds: timing.Estimate
  speed_up: timing.Estimate
  limit: float | None
  difference: float


class Rows:
  """The policy of the benchmark: rows of token ids in, logits out."""

  def encode(self, item: Any) -> Encoded:
    """A row as it is."""
    inputs = {'tokens': item, 'token_types': np.zeros_like(item)}
    return Encoded(inputs, len(item), VARIANT)

  def decide(self, stage: int, rows: Any, outputs: Mapping[str, Any]) -> Any:
    """Rows leave in which every token has halted."""
    return ~np.asarray(outputs['running'])

  def answer(self, row: Any) -> np.ndarray:
    """The logits."""
    return np.asarray(row.outputs[-1]['logits'])


def run(settings: Settings) -> list[Row]:
  """Times every form for every batch size and share.

  Raises:
    ValueError: the variant is unknown.
  """
  model = AlbertClassifier(
    variant=settings.variant, vocab_size=VOCAB_SIZE,
    max_positions=settings.length, dtype=jnp.dtype(settings.dtype),
  )  # fmt: skip
  rows = []
  for batch in settings.batches:
    tokens = np.random.default_rng(0).integers(
      1, VOCAB_SIZE, (batch, settings.length), dtype=np.int32
    )
    inputs = (
      jnp.asarray(tokens),
      jnp.zeros_like(tokens),
      jnp.full((batch,), settings.length, jnp.int32),
    )
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), *inputs))['params']
    for share in settings.shares:
      score = score_for(model, params, inputs, share)
      variables = {'params': params | {'score': score}}
      rows += _compare(settings, model, variables, inputs)
  return rows


def score_for(
  model: AlbertClassifier,
  params: dict[str, Any],
  inputs: tuple[Any, ...],
  share: float,
) -> dict[str, Any]:
  """A halting score by which tokens take about this share of the iterations.

  Its direction is random, its spread over the first states fixed; the bias is
  found by bisection.
  """
  fixed = dataclasses.replace(model, halting='')
  encoded: Any = fixed.apply(
    {'params': _without_score(params)}, *inputs, method='encode',
    trace=lambda before, after, spent: after,
  )  # fmt: skip
  first = encoded.trace[0].astype(jnp.float32)
  states = first.reshape(-1, first.shape[-1])
  kernel = jax.random.normal(jax.random.key(1), (states.shape[-1], 1))
  kernel = SPREAD * kernel / (states @ kernel).std()
  center = (states @ kernel).mean(0)

  @jax.jit
  def taken(bias: Any) -> Any:
    score = {'kernel': kernel, 'bias': bias - center}
    out = model.apply({'params': params | {'score': score}}, *inputs)[1]
    return out['ponder']['steps'].mean()

  low, high = -12.0, 12.0
  wanted = share * model.max_iterations
  for _ in range(12):
    middle = (low + high) / 2
    low, high = (middle, high) if taken(middle) > wanted else (low, middle)
  return {'kernel': kernel, 'bias': (low + high) / 2 - center}


def _without_score(params: Mapping[str, Any]) -> dict[str, Any]:
  return {name: leaf for name, leaf in params.items() if name != 'score'}


def _compare(
  settings: Settings,
  model: AlbertClassifier,
  variables: Mapping[str, Any],
  inputs: tuple[Any, ...],
) -> list[Row]:
  _, out = jax.jit(model.apply)(variables, *inputs)
  steps = np.asarray(out['ponder']['steps'])
  most = model.max_iterations
  shape = (settings.length,)
  fixed_model = dataclasses.replace(model, halting='')
  limit = fixed_model.flops(shape) / model.flops(shape, float(steps.mean()))
  chain = AlbertChain(model, variables, iterations=settings.iterations)
  batch = len(steps)
  with Engine(chain, Rows(), (settings.length,), (batch,)) as engine:
    texts = list(np.asarray(inputs[0]))
    functions = dict(_forms(model, fixed_model, variables, inputs))
    functions['engine'] = lambda: np.stack(engine.predict(texts))
    timings = timing.measure(
      functions, repeats=settings.repeats, warmup=settings.warmup
    )
    logits = {name: np.asarray(run()) for name, run in functions.items()}
    differences = {
      name: float(np.abs(found - logits[_reference(name)]).max())
      for name, found in logits.items()
    }
  best = min(DENSE, key=lambda name: timings.estimate(name).median)
  return [
    Row(
      batch=batch,
      what=name,
      mean_share=float(steps.mean()) / most,
      depth_share=float(steps.max(1).mean()) / most,
      seconds=timings.estimate(name),
      speed_up=timings.ratio(best, name),
      limit=None if name in FIXED else limit,
      difference=differences[name],
    )
    for name in functions
  ]


def _reference(name: str) -> str:
  return DENSE[0] if name in FIXED else 'masked'


def _forms(
  model: AlbertClassifier,
  fixed: AlbertClassifier,
  variables: Mapping[str, Any],
  inputs: tuple[Any, ...],
) -> Iterator[tuple[str, Callable[[], Any]]]:
  """The forms that are one program, by name."""
  dense = {'params': _without_score(variables['params'])}
  most = model.max_iterations

  def unrolled(
    module: AlbertClassifier, apply: Any, tokens: Any, types: Any, length: Any
  ) -> jax.Array:
    x = module.embed(tokens, types)
    valid = jnp.arange(tokens.shape[1])[None] < length[:, None]
    block, block_variables = module.block[0].unbind()
    for _ in range(most):
      x = apply(block, block_variables, x, valid)
    return module.classify(x[:, 0])[0]

  dynamic = dataclasses.replace(model, dynamic=True)
  for name, function, own in (
    ('fixed, scanned', lambda v, *x: fixed.apply(v, *x)[0], dense),
    (
      'fixed, unrolled',
      lambda v, *x: fixed.apply(v, nn.Module.apply, *x, method=unrolled),
      dense,
    ),
    (
      ENGINE_FORMS,
      lambda v, *x: fixed.apply(v, _with_engine_forms, *x, method=unrolled),
      {'params': transposed_kernels.transpose(dense['params'])},
    ),
    ('masked', lambda v, *x: model.apply(v, *x)[0], variables),
    ('while_loop', lambda v, *x: dynamic.apply(v, *x)[0], variables),
  ):
    yield name, _bound(jax.jit(function), own, *inputs)


def _with_engine_forms(
  block: Any, variables: Mapping[str, Any], x: jax.Array, valid: jax.Array
) -> jax.Array:
  """A block of all tokens in the engine's forms; their values are finite."""

  def attend(
    query: Any, key: Any, value: Any, mask: Any, **_: Any
  ) -> tuple[Any, None]:
    return packed_attention.weighted_values(query, key, value, mask), None

  return transposed_kernels.apply(
    block.clone(attend=attend), variables, x, valid
  ).x


def _bound(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
  return lambda: function(*arguments)
