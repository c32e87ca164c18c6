"""Candidates of `launch.benchmark albert`: halting against fixed depth.

One device, random tokens. With random parameters the halting score is set so
that tokens take a given share of the iterations on average; the time depends
on which tokens halt when, not on why.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from albert_act import packed_attention, transposed_kernels
from albert_act.model import AlbertClassifier, AlbertPretraining
from albert_act.pretraining import Pretraining
from albert_act.serving import VARIANT, AlbertChain
from dataset_lib.source import DatasetInfo
from eval_lib import benchmark
from eval_lib.benchmark import Call, Candidate
from launch.candidates_adatape import train_step
from model_lib import pondering
from serve_lib.chain import Encoded
from serve_lib.engine import Engine

VOCAB_SIZE = 1000
SPREAD = 2.0  # standard deviation of the first scores' logits
BASELINES = ('fixed, scanned', 'fixed, unrolled')


def tables(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
  """Yields names and tables of the benchmark; see `launch.benchmark`."""
  pairs = itertools.product(settings['batch'], settings['shares'])
  cases = (
    ({'batch': batch, 'mean': mean}, candidates(batch, mean, settings))
    for batch, mean in pairs
  )
  yield '', benchmark.tables(cases, settings)
  most = AlbertPretraining(variant=settings['variant']).max_iterations
  chunks = (0, pondering.balanced_chunk(most))
  if rows := settings['train_batch']:
    labels = [{'batch': rows, 'remat_chunk': chunk} for chunk in chunks]
    cases = ((case, train_candidates(case, settings)) for case in labels)
    yield 'train', benchmark.tables(cases, settings)


def prepare(batch: int, mean: float, settings: Mapping[str, Any]) -> Any:
  """Makes a model whose tokens take a mean share of the iterations.

  Returns:
    (model, its variables, its inputs, iterations of each token `[B, L]`).
  """
  length = settings['length']
  model = AlbertClassifier(
    variant=settings['variant'], vocab_size=VOCAB_SIZE, max_positions=length,
    dtype=jnp.dtype(settings['dtype']),
  )  # fmt: skip
  inputs = (
    jnp.asarray(_ids(np.random.default_rng(0), batch, length)),
    jnp.zeros((batch, length), jnp.int32),
    jnp.full((batch,), length, jnp.int32),
  )
  params = nn.unbox(jax.jit(model.init)(jax.random.key(0), *inputs))['params']
  params |= {'score': _score_for(model, params, inputs, mean)}
  _, out = jax.jit(model.apply)({'params': params}, *inputs)
  return model, {'params': params}, inputs, np.asarray(out['ponder']['steps'])


def _ids(rng: np.random.Generator, *shape: int) -> np.ndarray:
  return rng.integers(1, VOCAB_SIZE, shape, dtype=np.int32)


def _score_for(
  model: Any, params: Mapping[str, Any], inputs: tuple[Any, ...], share: float
) -> dict[str, Any]:
  """Returns a halting score by which tokens take a share of the iterations.

  Its direction is random, its spread over the first states fixed; the bias is
  found by bisection.
  """
  encoded: Any = dataclasses.replace(model, halting='').apply(
    {'params': _without_score(params)}, *inputs,
    method='encode', trace=lambda before, after, spent: after,
  )  # fmt: skip
  first = encoded.trace[0].astype(jnp.float32)
  states = first.reshape(-1, first.shape[-1])
  kernel = jax.random.normal(jax.random.key(1), (states.shape[-1], 1))
  kernel = SPREAD * kernel / (states @ kernel).std()
  center = (states @ kernel).mean(0)

  @jax.jit
  def taken(bias: Any) -> Any:
    score = {'kernel': kernel, 'bias': bias - center}
    out = model.apply({'params': {**params, 'score': score}}, *inputs)[1]
    return out['ponder']['steps'].mean()

  low, high = -12.0, 12.0
  for _ in range(12):
    middle = (low + high) / 2
    is_more = taken(middle) > share * model.max_iterations
    low, high = (middle, high) if is_more else (low, middle)
  return {'kernel': kernel, 'bias': (low + high) / 2 - center}


def _without_score(params: Mapping[str, Any]) -> dict[str, Any]:
  return {name: leaf for name, leaf in params.items() if name != 'score'}


def candidates(
  batch: int, mean: float, settings: Mapping[str, Any]
) -> list[Candidate]:
  """Returns the forms of a forward pass; the first two are baselines."""
  model, variables, inputs, steps = prepare(batch, mean, settings)
  fixed = dataclasses.replace(model, halting='')
  dynamic = dataclasses.replace(model, dynamic=True)
  dense = {'params': _without_score(variables['params'])}
  turned = {'params': transposed_kernels.transpose(dense['params'])}
  programs: dict[str, tuple[Any, Any]] = {
    'fixed, scanned': (lambda *x: fixed.apply(*x)[0], dense),
    'fixed, unrolled': (_unrolled(fixed, nn.Module.apply), dense),
    # The engine's products, activation and division of attention: the gain of
    # these forms without halting.
    "fixed, engine's forms": (_unrolled(fixed, _apply_in_engine_forms), turned),
    'masked': (lambda *x: model.apply(*x)[0], variables),
    'while_loop': (lambda *x: dynamic.apply(*x)[0], variables),
  }
  runs: dict[str, Any] = {
    name: functools.partial(jax.jit(function), values, *inputs)
    for name, (function, values) in programs.items()
  }
  runs['engine'] = _engine(model, variables, inputs, settings['iterations'])
  columns = {
    'mean_share': float(steps.mean()) / model.max_iterations,
    'depth_share': float(steps.max(1).mean()) / model.max_iterations,
  }

  def candidate(name: str, run: Any) -> Candidate:
    is_fixed = name.startswith('fixed')
    # Of a halting model, what its tokens need.
    needed = None if is_fixed else float(steps.mean())
    cost = (fixed if is_fixed else model).flops(inputs[0].shape[1:], needed)
    return Candidate(
      name, lambda: Call(run, 1, run(), columns), flops=(cost, cost),
      is_baseline=name in BASELINES, group='fixed' if is_fixed else 'halting',
    )  # fmt: skip

  return [candidate(name, run) for name, run in runs.items()]


def _unrolled(model: AlbertClassifier, apply: Any) -> Any:
  """Returns the function of a program without a loop."""

  def run(module: Any, tokens: Any, types: Any, length: Any) -> jax.Array:
    x = module.embed(tokens, types)
    valid = jnp.arange(tokens.shape[1])[None] < length[:, None]
    block, variables = module.block[0].unbind()
    for _ in range(module.max_iterations):
      x = apply(block, variables, x, valid).x
    return module.classify(x[:, 0])[0]

  return functools.partial(model.apply, method=run)


def _apply_in_engine_forms(
  block: Any, variables: Mapping[str, Any], x: jax.Array, valid: jax.Array
) -> Any:
  """Applies a block to all tokens in the engine's forms; values are finite."""

  def attend(query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
    return packed_attention.weighted_values(query, key, value, mask), None

  block = block.clone(attend=attend)
  return transposed_kernels.apply(block, variables, x, valid)


class _Rows:
  """The policy of the benchmark: rows of token ids in, logits out."""

  def encode(self, item: Any) -> Encoded:
    inputs = {'tokens': item, 'token_types': np.zeros_like(item)}
    return Encoded(inputs, len(item), VARIANT)

  def decide(self, stage: int, rows: Any, outputs: Mapping[str, Any]) -> Any:
    return ~np.asarray(outputs['running'])

  def answer(self, row: Any) -> np.ndarray:
    return np.asarray(row.outputs[-1]['logits'])


def _engine(model: Any, variables: Any, inputs: Any, iterations: int) -> Any:
  chain = AlbertChain(model, variables, iterations=iterations)
  texts = list(np.asarray(inputs[0]))
  engine = Engine(chain, _Rows(), (len(texts[0]),), (len(texts),))
  engine.warm_up()
  return lambda: np.stack(engine.predict(texts))


def train_candidates(
  case: Mapping[str, Any], settings: Mapping[str, Any]
) -> list[Candidate]:
  """Returns the step of pretraining with and without halting.

  The masked form takes the same time whichever tokens halt.
  """
  make = functools.partial(_prepare_train_step, case, settings)
  return [
    Candidate('fixed', functools.partial(make, ''), is_baseline=True),
    Candidate('halting', functools.partial(make, 'act')),
  ]


def _prepare_train_step(
  case: Mapping[str, Any], settings: Mapping[str, Any], halting: str
) -> Call:
  rows, length, variant = case['batch'], settings['length'], settings['variant']
  words = length // 5
  info = DatasetInfo('tokens', (length,), 'int32', 2, (), rows, VOCAB_SIZE)
  model = dict(
    name='albert_act.model:AlbertPretraining', variant=variant,
    vocab_size=VOCAB_SIZE, max_positions=length, halting=halting,
    remat_chunk=case['remat_chunk'],
  )  # fmt: skip
  loss = dict(ponder_weight=5e-4, sop_weight=1.0)
  dataset = dict(mask_share=0.2)
  config = dict(
    dtype=settings['dtype'], model=model, loss=loss, dataset=dataset
  )
  rng = np.random.default_rng(0)
  batch = {
    'tokens': _ids(rng, rows, length),
    'token_types': np.zeros((rows, length), np.int32),
    'length': np.full(rows, length, np.int32),
    'mlm_positions': _ids(rng, rows, words) % length,
    'mlm_labels': _ids(rng, rows, words),
    'mlm_weights': np.ones((rows, words), np.float32),
    'label': _ids(rng, rows) % 2,
    'mask': np.ones(rows, np.float32),
  }
  iterations = AlbertPretraining(variant=variant).max_iterations
  return train_step(Pretraining(config, info), batch, iterations=iterations)
