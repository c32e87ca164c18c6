"""Models of `launch.benchmark eat_speed`, prepared in their processes.

EAT prunes 30 % after layers 2 and 4 and has an exit at 4 (EAT, section 4),
where a planned share of the rows leaves. All models take NumPy arrays and
return NumPy arrays.
"""

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util
from jaxtyping import Bool, Int

from eat.model import EatClassifier
from eat.policy import EatPolicy
from eat.serving import FULL, EatChain
from eval_lib.hosts import Call, Case
from launch import peers
from model_lib.bert import BertClassifier
from serve_lib.chain import Failure
from serve_lib.engine import Engine
from serve_lib.grid import doubling
from serve_lib.items import TextReader
from serve_lib.process import keep_freed_memory

PRUNE_LAYERS, PRUNE_RATIOS, EXIT_LAYER = (2, 4), (0.3, 0.3), 4
CLASS_NAMES = ('first', 'second')


class Shape(NamedTuple):
  """The fields of all models.

  Attributes:
    variant: of BERT, by name.
    depth: layers; 0 for those of the variant.
    dtype: compute dtype.
    weights: 'bert', or 'distil' for half the layers, no token types and the
      pooler of DistilBERT.
  """

  variant: str
  depth: int
  dtype: str
  weights: str = 'bert'

  def fields(self) -> dict[str, Any]:
    """Returns the fields of `BertClassifier` and `EatClassifier`."""
    fields: dict[str, Any] = dict(
      variant=self.variant, num_classes=2, dtype=jnp.dtype(self.dtype)
    )
    depth = self.depth or BertClassifier(**fields).depth
    if self.weights == 'bert':
      return fields | {'depth': depth}
    distil = dict(type_vocab_size=0, pooler_activation='relu')
    return fields | distil | {'depth': depth // 2}


def adaptive_model(shape: Shape, window: int = 0) -> EatClassifier:
  """Returns the EAT of a shape."""
  return EatClassifier(
    **shape.fields(), prune_layers=PRUNE_LAYERS, prune_ratios=PRUNE_RATIOS,
    window=window, exit_layers=(EXIT_LAYER,),
  )  # fmt: skip


def dense_model(shape: Shape) -> EatClassifier:
  """Returns the BERT of a shape as an EAT without anything adaptive."""
  return EatClassifier(
    **shape.fields(), prune_layers=(), prune_ratios=(), window=0,
    exit_layers=(),
  )  # fmt: skip


def random_params(model: Any) -> dict[str, Any]:
  """Returns nested parameters, the same for the same path and shape.

  They are float32, those of the blocks' matrices in the compute dtype, to
  which every call would round them: half the memory traffic in bfloat16.
  """
  shapes = jax.eval_shape(
    lambda x: nn.unbox(model.init(jax.random.key(0), **x)['params']),
    inputs(np.zeros((1, 2), np.int32)),
  )
  params = {}
  for path, leaf in traverse_util.flatten_dict(shapes, sep='/').items():
    rng = np.random.default_rng(zlib.crc32(path.encode()))
    noise = np.float32(0.02) * rng.standard_normal(leaf.shape, np.float32)
    # Scales of exactly 1 would give all tokens one norm, and rounding would
    # choose which of them are pruned.
    value = noise + np.float32(path.endswith('scale'))
    narrow = path.startswith('block_') and path.endswith('/kernel')
    params[path] = value.astype(model.dtype) if narrow else value
  return traverse_util.unflatten_dict(params, sep='/')


def inputs(tokens: Int[np.ndarray, 'B L']) -> dict[str, np.ndarray]:
  """Returns the inputs of a model for full rows."""
  return {
    'tokens': tokens,
    'token_types': np.zeros_like(tokens),
    'length': np.full(len(tokens), tokens.shape[1], np.int32),
  }


def make_dense(case: Case, form: str, shape: Shape, length: int) -> Call:
  """Prepares a dense form: a list of programs, called one after the other.

  The same layers can be one program, a loop over stacked parameters, or several
  programs. XLA is not equally good at them; the baseline is to be the best.
  """
  keep_freed_memory()
  model = dense_model(shape)
  batch = inputs(peers.token_rows(case['batch'], length))
  parts = _parts(form, model, jax.device_put(random_params(model)))
  jitted = {function: jax.jit(function) for function, _ in parts}

  def run() -> np.ndarray:
    state: Any = batch
    for function, params in parts:
      state = jitted[function](params, state)
    return np.asarray(state)

  device = {'device': jax.devices()[0].device_kind}
  return Call(run, len(batch['tokens']), peers.scores(run()), device)


def _parts(form: str, model: EatClassifier, params: Any) -> list[Any]:
  """Returns (function of parameters and state, parameters) of each program."""
  depth = model.depth
  if form == 'engine chain':
    stage = EatChain(model, {}).stage(0, FULL, 0)
    return [(lambda p, x: stage({'params': p}, x)[1]['logits'], params)]
  if form == 'scanned':
    return [(functools.partial(_scanned, model), _stacked(params, depth))]
  size = {'unrolled': depth, 'chunked': depth // 2, 'by layer': 1}[form]
  rest = {k: v for k, v in params.items() if not k.startswith('block_')}
  found = []
  for end in range(size, depth + 1, size):
    own = {f'block_{i}': params[f'block_{end - size + i}'] for i in range(size)}
    # Equal functions are compiled once.
    function = _layers(model, size, end == size, end == depth)
    found.append((function, rest | own))
  return found


@functools.lru_cache(maxsize=8)
def _layers(
  model: EatClassifier, size: int, is_first: bool, is_last: bool
) -> Callable[[Any, Any], Any]:
  """Returns a program of `size` layers, with embeddings or head at the ends."""

  def run(module: EatClassifier, state: Any) -> Any:
    if is_first:
      state = module.embed(**state)
    state = module.encode(state, 1, size).tokens
    if is_last:
      return module.classify(state.x[:, 0])[0]
    return state

  return lambda p, state: model.apply({'params': p}, state, method=run)


def _stacked(params: Mapping[str, Any], depth: int) -> tuple[Any, Any]:
  blocks = [params[f'block_{index}'] for index in range(depth)]
  rest = {k: v for k, v in params.items() if not k.startswith('block_')}
  return rest, jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)


def _scanned(model: EatClassifier, weights: Any, batch: Any) -> jax.Array:
  """Runs the blocks as a loop over stacked parameters."""
  rest, blocks = weights

  def apply(method: Any, state: Any, params: Any = rest) -> Any:
    return model.apply({'params': params}, state, method=method)

  def step(state: Any, block: Any) -> tuple[Any, None]:
    run = lambda module, x: module.encode(x, 1, 1).tokens  # noqa: E731
    return apply(run, state, {'block_0': block}), None

  state = apply(lambda module, x: module.embed(**x), batch)
  state = jax.lax.scan(step, state, blocks)[0]
  return apply(lambda module, x: module.classify(x)[0], state.x[:, 0])


class PlannedPolicy(EatPolicy):
  """Lets out a planned share of the rows at the first head.

  The rule is asked about every row, as in service; its decision is replaced.
  The source of an item is its number.

  Attributes:
    rate: percent of the rows that leave at the first head.
  """

  rate = 0

  def decide(
    self, stage: int, rows: Sequence[Any], outputs: Mapping[str, Any]
  ) -> Bool[np.ndarray, ' b']:
    """Returns which rows leave by the plan."""
    super().decide(stage, rows, outputs)
    numbers = [int(row.encoded.context['source']) for row in rows]
    return leaves(np.array(numbers), self.rate)


def leaves(numbers: Int[np.ndarray, ' N'], rate: int) -> Bool[np.ndarray, ' N']:
  """Returns which rows leave: `rate` percent of them, spread evenly.

  Exact for a number of rows of which `rate` percent is whole.
  """
  return (numbers + 1) * rate // 100 > numbers * rate // 100


def rows_per_call(batch: int, rates: Sequence[int], fill: int) -> int:
  """Returns the rows of one call of the engine: whole batches, exact rates.

  Args:
    batch: rows of a full batch.
    rates: percent.
    fill: batches that the rows fill at least. At batch 1 requests come one by
      one, and only the rates count.
  """
  unit = math.lcm(batch, *(100 // math.gcd(rate, 100) for rate in rates))
  return unit * math.ceil((fill if batch > 1 else 1) * batch / unit)


@functools.lru_cache(maxsize=1)
def _served(
  shape: Shape, length: int, batch: int, window: int
) -> tuple[Engine, PlannedPolicy]:
  keep_freed_memory()
  model = adaptive_model(shape, window)
  params = jax.device_put(random_params(model))
  chain = EatChain(model, {'params': params}, with_full=False)
  policy = PlannedPolicy(
    chain, TextReader(None, length), CLASS_NAMES, (length,)
  )
  engine = Engine(chain, policy, (length,), doubling(batch))
  engine.warm_up()
  return engine, policy


def make_engine(
  case: Case,
  rate: int,
  rates: Sequence[int],
  fill: int,
  shape: Shape,
  length: int,
  window: int,
) -> Call:
  """Prepares EAT in the engine with a planned share of exits.

  At batch 1 a request is sent when the one before has been answered.
  """
  batch = case['batch']
  engine, policy = _served(shape, length, batch, window)
  rows = rows_per_call(batch, rates, fill)
  tokens = peers.token_rows(max(batch, peers.CHECKED_ROWS), length)
  items = [
    {'tokens': tokens[number % len(tokens)], 'source': str(number)}
    for number in range(rows)
  ]

  def run() -> None:
    policy.rate = rate
    if batch == 1:
      answers = [engine.submit(item).result() for item in items]
    else:
      answers = engine.predict(items)
    check_answers(answers)
    left = sum(answer.depth == EXIT_LAYER for answer in answers)
    if left * 100 != rate * rows:
      raise RuntimeError(f'{left} of {rows} rows left, expected {rate} %')

  policy.rate = 0
  first = [
    {'tokens': row, 'source': str(number)}
    for number, row in enumerate(tokens[: peers.CHECKED_ROWS])
  ]
  shares = [
    [answer.probabilities[name] for name in CLASS_NAMES]
    for answer in check_answers(engine.predict(first))
  ]
  device = {'device': jax.devices()[0].device_kind}
  return Call(run, rows, peers.scores(np.log(shares)), device)


def check_answers(answers: Sequence[Any]) -> Sequence[Any]:
  """Returns the answers; raises RuntimeError if one is a `Failure`."""
  for answer in answers:
    if isinstance(answer, Failure):
      raise RuntimeError(f'no answer: {answer.during}') from answer.error
  return answers


def make_lengths(
  case: Case,
  shape: Shape,
  buckets: Sequence[int],
  lengths: Sequence[int],
  capacity: int,
) -> Call:
  """Prepares the dense model in the engine, for rows of different lengths."""
  keep_freed_memory()
  model = dense_model(shape)
  chain = EatChain(model, {'params': jax.device_put(random_params(model))})
  reader = TextReader(None, buckets[-1])
  policy = EatPolicy(chain, reader, CLASS_NAMES, buckets)
  # Fewer batch sizes than in service: each is compiled at every length.
  batches = sorted({*doubling(capacity)[::2], capacity})
  engine = Engine(chain, policy, buckets, batches)
  engine.warm_up()
  tokens = peers.token_rows(1, buckets[-1])[0]
  items = [{'tokens': tokens[:length]} for length in lengths]
  return Call(lambda: check_answers(engine.predict(items)), len(items))
