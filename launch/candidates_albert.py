"""Candidates of `launch.benchmark albert`: halting against fixed depth.

One device, random tokens. With random parameters the halting score is set so
that tokens take a given share of the iterations on average; the time depends
on which tokens halt when, not on why.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

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
from eval_lib.hosts import Call, Candidate, Case, Hosts
from launch.candidates_adatape import train_step
from model_lib import pondering
from serve_lib.chain import Encoded
from serve_lib.engine import Engine

VOCAB_SIZE = 1000
SPREAD = 2.0  # standard deviation of the first scores' logits
SCANNED, UNROLLED = 'fixed, scanned', 'fixed, unrolled'
# Fixed depth with the engine's products, activation and division of attention:
# the gain of these forms without halting.
ENGINE_FORMS = "fixed, engine's forms"
FIXED = (SCANNED, UNROLLED, ENGINE_FORMS)
FORMS = (*FIXED, 'masked', 'while_loop', 'engine')


def check(settings: Mapping[str, Any]) -> None:
  """Raises ValueError, naming the field, if the model cannot be built."""
  AlbertPretraining(variant=settings['variant'])


def tables(settings: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
  """Runs the benchmark; see `launch.benchmark`.

  Args:
    settings: the flags of the command.
  """
  most = AlbertPretraining(variant=settings['variant']).max_iterations
  cases = [
    {'batch': batch, 'mean': share}
    for batch in settings['batch']
    for share in settings['shares']
  ]
  timing = dict(rounds=settings['rounds'], warmup=settings['warmup'])
  result = {}
  with Hosts() as hosts:
    result[''] = benchmark.run(candidates(settings), cases, hosts, **timing)
    if settings['train_batch']:
      cases = [
        {'batch': settings['train_batch'], 'remat_chunk': chunk}
        for chunk in (0, pondering.balanced_chunk(most))
      ]
      result['train'] = benchmark.run(
        train_candidates(settings), cases, hosts, **timing
      )
  return result


def candidates(settings: Mapping[str, Any]) -> list[Candidate]:
  """The forms of a forward pass."""
  sizes = {name: settings[name] for name in ('variant', 'length', 'dtype')}
  return [
    Candidate(
      form,
      make_form,
      {'form': form, 'iterations': settings['iterations'], **sizes},
      is_baseline=form in (SCANNED, UNROLLED),
      group='fixed' if form in FIXED else 'halting',
    )
    for form in FORMS
  ]


class Setup(NamedTuple):
  """A model whose tokens halt as a case asks.

  Attributes:
    model: with halting.
    fixed: the same model at fixed depth.
    variables: of `model`; `fixed` does not need the score.
    inputs: tokens, token types `[B, L]` and lengths `[B]`.
    steps: iterations of each token, `[B, L]`.
  """

  model: AlbertClassifier
  fixed: AlbertClassifier
  variables: dict[str, Any]
  inputs: tuple[Any, ...]
  steps: np.ndarray

  @property
  def dense(self) -> dict[str, Any]:
    """The variables without the score."""
    params = self.variables['params']
    return {'params': {k: v for k, v in params.items() if k != 'score'}}


@functools.lru_cache(maxsize=1)
def prepare(
  batch: int, mean: float, variant: str, length: int, dtype: str
) -> Setup:
  """Makes a model whose tokens take a mean share of the iterations."""
  model = AlbertClassifier(
    variant=variant, vocab_size=VOCAB_SIZE, max_positions=length,
    dtype=jnp.dtype(dtype),
  )  # fmt: skip
  tokens = np.random.default_rng(0).integers(
    1, VOCAB_SIZE, (batch, length), dtype=np.int32
  )
  inputs = (
    jnp.asarray(tokens),
    jnp.zeros_like(tokens),
    jnp.full((batch,), length, jnp.int32),
  )
  params = nn.unbox(jax.jit(model.init)(jax.random.key(0), *inputs))['params']
  params |= {'score': score_for(model, params, inputs, mean)}
  _, out = jax.jit(model.apply)({'params': params}, *inputs)
  fixed = dataclasses.replace(model, halting='')
  steps = np.asarray(out['ponder']['steps'])
  return Setup(model, fixed, {'params': params}, inputs, steps)


def score_for(
  model: AlbertClassifier,
  params: Mapping[str, Any],
  inputs: tuple[Any, ...],
  share: float,
) -> dict[str, Any]:
  """Returns a halting score by which tokens take a share of the iterations.

  Its direction is random, its spread over the first states fixed; the bias is
  found by bisection.
  """
  fixed = dataclasses.replace(model, halting='')
  dense = {name: leaf for name, leaf in params.items() if name != 'score'}
  encoded: Any = fixed.apply(
    {'params': dense}, *inputs, method='encode',
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
    out = model.apply({'params': {**params, 'score': score}}, *inputs)[1]
    return out['ponder']['steps'].mean()

  low, high = -12.0, 12.0
  wanted = share * model.max_iterations
  for _ in range(12):
    middle = (low + high) / 2
    low, high = (middle, high) if taken(middle) > wanted else (low, middle)
  return {'kernel': kernel, 'bias': (low + high) / 2 - center}


def make_form(case: Case, form: str, iterations: int, **sizes: Any) -> Call:
  """Prepares a form of a forward pass."""
  setup = prepare(**case, **sizes)
  most = setup.model.max_iterations
  columns = {
    'mean_share': float(setup.steps.mean()) / most,
    'depth_share': float(setup.steps.max(1).mean()) / most,
  }
  if form == 'engine':
    run = _engine(setup, iterations)
  else:
    function, variables = _program(form, setup)
    run = functools.partial(jax.jit(function), variables, *setup.inputs)
  shape = (setup.inputs[0].shape[1],)
  # Of a halting model, what its tokens need.
  flops = setup.model.flops(shape, float(setup.steps.mean()))
  if form in FIXED:
    flops = setup.fixed.flops(shape)
  output = np.asarray(run())
  return Call(run, output=output, columns=columns, flops=(flops, flops))


def _program(form: str, setup: Setup) -> tuple[Any, dict[str, Any]]:
  """The function of a form that is one program, and its variables."""
  model, fixed = setup.model, setup.fixed
  if form == SCANNED:
    return lambda v, *x: fixed.apply(v, *x)[0], setup.dense
  if form in (UNROLLED, ENGINE_FORMS):
    apply: Any = nn.Module.apply
    variables = setup.dense
    if form == ENGINE_FORMS:
      apply = _with_engine_forms
      variables = {'params': transposed_kernels.transpose(variables['params'])}
    run = functools.partial(_unrolled, apply=apply)
    return lambda v, *x: fixed.apply(v, *x, method=run), variables
  if form == 'while_loop':
    model = dataclasses.replace(model, dynamic=True)
  return lambda v, *x: model.apply(v, *x)[0], setup.variables


def _unrolled(
  module: AlbertClassifier, tokens: Any, types: Any, length: Any, apply: Any
) -> jax.Array:
  x = module.embed(tokens, types)
  valid = jnp.arange(tokens.shape[1])[None] < length[:, None]
  block, variables = module.block[0].unbind()
  for _ in range(module.max_iterations):
    x = apply(block, variables, x, valid).x
  return module.classify(x[:, 0])[0]


def _with_engine_forms(
  block: Any, variables: Mapping[str, Any], x: jax.Array, valid: jax.Array
) -> Any:
  """Applies a block to all tokens in the engine's forms; values are finite."""

  def attend(
    query: Any, key: Any, value: Any, mask: Any, **_: Any
  ) -> tuple[Any, None]:
    return packed_attention.weighted_values(query, key, value, mask), None

  return transposed_kernels.apply(
    block.clone(attend=attend), variables, x, valid
  )


class Rows:
  """The policy of the benchmark: rows of token ids in, logits out."""

  def encode(self, item: Any) -> Encoded:
    """Takes a row as it is."""
    inputs = {'tokens': item, 'token_types': np.zeros_like(item)}
    return Encoded(inputs, len(item), VARIANT)

  def decide(self, stage: int, rows: Any, outputs: Mapping[str, Any]) -> Any:
    """Lets out rows in which every token has halted."""
    return ~np.asarray(outputs['running'])

  def answer(self, row: Any) -> np.ndarray:
    """Returns the logits."""
    return np.asarray(row.outputs[-1]['logits'])


def _engine(setup: Setup, iterations: int) -> Any:
  chain = AlbertChain(setup.model, setup.variables, iterations=iterations)
  texts = list(np.asarray(setup.inputs[0]))
  engine = Engine(chain, Rows(), (len(texts[0]),), (len(texts),))
  engine.warm_up()
  return lambda: np.stack(engine.predict(texts))


# -- pretraining ---------------------------------------------------------------


def train_candidates(settings: Mapping[str, Any]) -> list[Candidate]:
  """The step of pretraining with and without halting.

  The masked form takes the same time whichever tokens halt.
  """
  sizes = {name: settings[name] for name in ('variant', 'length', 'dtype')}
  return [
    Candidate(
      name, make_train_step, {'halting': rule, **sizes}, is_baseline=not rule
    )
    for name, rule in (('fixed', ''), ('halting', 'act'))
  ]


def make_train_step(
  case: Case, halting: str, variant: str, length: int, dtype: str
) -> Call:
  """Prepares the step of pretraining on random tokens."""
  rows, words = case['batch'], length // 5
  info = DatasetInfo(
    input_key='tokens', input_shape=(length,), input_dtype='int32',
    num_classes=2, class_names=(), num_examples=rows, vocab_size=VOCAB_SIZE,
  )  # fmt: skip
  config = dict(
    dtype=dtype,
    model=dict(
      name='albert_act.model:AlbertPretraining', variant=variant,
      vocab_size=VOCAB_SIZE, max_positions=length, halting=halting,
      remat_chunk=case['remat_chunk'],
    ),
    loss=dict(ponder_weight=5e-4, sop_weight=1.0),
    dataset=dict(mask_share=0.2),
  )  # fmt: skip
  rng = np.random.default_rng(0)

  def ids(*shape: int) -> np.ndarray:
    return rng.integers(1, VOCAB_SIZE, shape, dtype=np.int32)

  batch = {
    'tokens': ids(rows, length),
    'token_types': np.zeros((rows, length), np.int32),
    'length': np.full(rows, length, np.int32),
    'mlm_positions': ids(rows, words) % length,
    'mlm_labels': ids(rows, words),
    'mlm_weights': np.ones((rows, words), np.float32),
    'label': ids(rows) % 2,
    'mask': np.ones(rows, np.float32),
  }
  call = train_step(Pretraining(config, info), batch)
  iterations = AlbertPretraining(variant=variant).max_iterations
  columns = {'iterations': iterations, **call.columns}
  return dataclasses.replace(call, columns=columns)
