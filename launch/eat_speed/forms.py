"""Our own contenders that classify a batch in a call: dense forms, bare chain.

The same twelve layers can be one program, a loop over stacked parameters, or
several programs, and XLA is not equally good at them: the baseline of a
speed-up has to be the best. A form is a list of parts, each a pure function of
its parameters and of what the part before it gave.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util

from eat.model import EatClassifier
from eat.serving import FULL, PRUNED, EatChain, as_adaptive
from launch.eat_speed import contender, lineup
from model_lib import convert
from model_lib.bert import BertClassifier

Parts = list[tuple[Callable[[Any, Any], Any], Any]]


def build(form: str, specification: Mapping[str, Any]) -> contender.Built:
  """A form as a contender.

  Args:
    form: a key of `FORMS`, or 'bare chain'.
    specification: see `launch.eat_speed.lineup.specification`.
  """
  model, params = load(specification)
  if form == 'bare chain':
    chain = eat_chain(model, params, specification)
    parts = bare_chain(chain, specification['length'])
  else:
    parts = FORMS[form](model, params)
  tokens = contender.token_rows(specification, model.vocab_size)
  cases, scores = contender.forward_cases(
    lambda batch: compile_parts(parts, inputs(tokens[:batch])), specification
  )
  return contender.Built(cases, scores, *describe())


def describe() -> tuple[str, dict[str, str]]:
  """The device, and versions."""
  versions = {'jax': jax.__version__, 'jaxlib': jax.lib.__version__}
  return jax.devices()[0].device_kind, versions


def load(specification: Mapping[str, Any]) -> tuple[BertClassifier, Any]:
  """The dense model, and its parameters on the device.

  Matrices of the blocks are in the compute dtype, to which every call would
  round them anyway: the same numbers for half the memory traffic.
  """
  sizes = convert.read_sizes(specification['weights'])
  dtype = jnp.dtype(specification['dtype'])
  model = BertClassifier(num_classes=lineup.NUM_CLASSES, **sizes, dtype=dtype)
  params = convert.load_params(specification['weights'])
  return model, jax.device_put(narrow(params, dtype))


def narrow(params: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
  """The parameters with the matrices of the blocks in a dtype."""
  flat = traverse_util.flatten_dict(params, sep='/')
  return traverse_util.unflatten_dict(
    {
      path: leaf.astype(dtype)
      if path.startswith('block_') and path.endswith('/kernel')
      else leaf
      for path, leaf in flat.items()
    },
    sep='/',
  )


def inputs(tokens: Any) -> dict[str, np.ndarray]:
  """What a model takes, of full rows `[B, L]`."""
  return {
    'tokens': tokens,
    'token_types': np.zeros_like(tokens),
    'length': np.full(len(tokens), tokens.shape[1], np.int32),
  }


def compile_parts(parts: Parts, batch: Mapping[str, Any]) -> Callable[[], Any]:
  """Compiles the parts for one batch; returns what gives its logits.

  Args:
    parts: equal functions of equal shapes are one program.
    batch: NumPy arrays, which every call brings to the device.
  """
  table: dict[Any, Any] = {}
  programs = []
  state: Any = batch
  for function, weights in parts:
    key = function, str(jax.tree.map(jnp.shape, state))
    if key not in table:
      table[key] = jax.jit(function).lower(weights, state).compile()
    programs.append((table[key], weights))
    state = jax.eval_shape(function, weights, state)

  def run() -> np.ndarray:
    state: Any = batch
    for program, weights in programs:
      state = program(weights, state)
    return np.asarray(state)

  return run


# -- dense ---------------------------------------------------------------------


def _unrolled(model: BertClassifier, params: Any) -> Parts:
  return [(lambda p, x: model.apply({'params': p}, **x)[0], params)]


def _scanned(model: BertClassifier, params: Any) -> Parts:
  """The blocks as a loop over stacked parameters."""
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *_blocks(params))

  def run(weights: Any, x: Any) -> Any:
    rest, blocks = weights

    def step(state: Any, block: Any) -> tuple[Any, None]:
      return _run_blocks(model, 1, {'block_0': block}, state), None

    state = jax.lax.scan(step, _start(model, rest, x), blocks)[0]
    return _finish(model, rest, state)

  return [(run, (_rest(params), stacked))]


def _chunked(model: BertClassifier, params: Any) -> Parts:
  """Two programs, each with half of the layers."""
  blocks, rest = _blocks(params), _rest(params)
  half = len(blocks) // 2
  first = _numbered(blocks[:half]) | rest
  last = _numbered(blocks[half:]) | rest

  def begin(weights: Any, x: Any) -> Any:
    return _run_blocks(model, half, weights, _start(model, weights, x))

  def end(weights: Any, state: Any) -> Any:
    state = _run_blocks(model, len(blocks) - half, weights, state)
    return _finish(model, weights, state)

  return [(begin, first), (end, last)]


def _by_layer(model: BertClassifier, params: Any) -> Parts:
  """A program for the embeddings, one for every block, one for the head."""
  rest = _rest(params)
  block = functools.partial(_run_blocks, model, 1)
  return [
    (functools.partial(_start, model), rest),
    *((block, {'block_0': one}) for one in _blocks(params)),
    (functools.partial(_finish, model), rest),
  ]


def _engine_chain(model: BertClassifier, params: Any) -> Parts:
  """What the engine runs of a dense model: of the last block [CLS] alone."""
  stage = dense_chain(model, params).stage(0, FULL, 0)
  variables = {'params': params}
  return [(lambda v, x: stage(v, x)[1]['logits'], variables)]


FORMS: Mapping[str, Callable[[BertClassifier, Any], Parts]] = {
  'unrolled': _unrolled,
  'scanned': _scanned,
  'chunked': _chunked,
  'by layer': _by_layer,
  'engine chain': _engine_chain,
}


def _blocks(params: Mapping[str, Any]) -> list[Any]:
  count = sum(name.startswith('block_') for name in params)
  return [params[f'block_{index}'] for index in range(count)]


def _rest(params: Mapping[str, Any]) -> dict[str, Any]:
  return {k: v for k, v in params.items() if not k.startswith('block_')}


def _numbered(blocks: list[Any]) -> dict[str, Any]:
  return {f'block_{index}': block for index, block in enumerate(blocks)}


def _start(model: BertClassifier, params: Any, x: Any) -> tuple[Any, Any]:
  """Embeds; returns tokens and mask."""

  def run(module: BertClassifier) -> Any:
    return module.embeddings(x['tokens'], x['token_types'])

  mask = jnp.arange(x['tokens'].shape[1])[None] < x['length'][:, None]
  return model.apply({'params': params}, method=run), mask


def _run_blocks(
  model: BertClassifier, count: int, params: Any, state: tuple[Any, Any]
) -> tuple[Any, Any]:
  """Runs the first blocks of the model, with whatever parameters."""

  def run(module: BertClassifier, tokens: Any) -> Any:
    for block in module.block[:count]:
      tokens = block(tokens, state[1])
    return tokens

  return model.apply({'params': params}, state[0], method=run), state[1]


def _finish(model: BertClassifier, params: Any, state: tuple[Any, Any]) -> Any:
  """Pools [CLS] and classifies it."""

  def run(module: BertClassifier) -> Any:
    pooled = module.pooler(state[0][:, 0])
    return module.head(pooled.astype(jnp.float32))

  return model.apply({'params': params}, method=run)


# -- chains --------------------------------------------------------------------


def dense_chain(model: BertClassifier, params: Any) -> EatChain:
  """The dense model as the engine takes it, one stage."""
  return EatChain(as_adaptive(model), {'params': params})


def eat_chain(
  model: BertClassifier, params: Any, specification: Mapping[str, Any]
) -> EatChain:
  """EAT on the parameters of a dense model, in its pruned form alone.

  The heads at exits have parameters of their own, random ones.
  """
  adaptive = as_adaptive(model).clone(
    prune_layers=lineup.PRUNE_LAYERS,
    prune_ratios=lineup.PRUNE_RATIOS,
    window=specification['window'],
    exit_layers=(lineup.EXIT_LAYER,),
  )
  variables = {'params': _with_heads(adaptive, params)}
  return EatChain(adaptive, variables, with_full=False)


def _with_heads(model: EatClassifier, params: Any) -> dict[str, Any]:
  shapes = jax.eval_shape(
    lambda x: nn.unbox(model.init(jax.random.key(0), **x)['params']),
    inputs(np.zeros((1, 2), np.int32)),
  )
  wanted = traverse_util.flatten_dict(shapes, sep='/')
  given = traverse_util.flatten_dict(params, sep='/')
  absent = {
    path: leaf.shape for path, leaf in wanted.items() if path not in given
  }
  return dict(params) | jax.device_put(lineup.random_params(absent))


def bare_chain(chain: EatChain, length: int) -> Parts:
  """The stages one after the other: nobody leaves, no engine.

  The logits of the first head are computed, as for an engine that asks.
  """
  first, last = (chain.stage(index, PRUNED, length) for index in range(2))

  def end(variables: Any, state: Any) -> Any:
    return last(variables, state[0])[1]['logits']

  return [(first, chain.variables), (end, chain.variables)]
