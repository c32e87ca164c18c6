"""Candidates of `launch.benchmark eat_speed`: EAT, dense BERTs, DistilBERTs.

All run the same random weights and token ids, each in a process of its own. EAT
prunes 30 % after layers 2 and 4 (EAT, section 4), and a fixed share of the rows
exits at layer 4.
"""

import dataclasses
import functools
import itertools
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Int

from core.errors import ConfigError
from eat.model import EatClassifier
from eat.serving import EatChain
from eval_lib import peers
from eval_lib.benchmark import Call, Candidate, checked, log_probabilities
from eval_lib.plots import Line, Panel
from model_lib import convert
from serve_lib.chain import doubling
from serve_lib.engine import Engine
from serve_lib.items import TextReader
from serve_lib.policies import ExitOptions, ExitPolicy

EXIT_LAYER, VOCAB_SIZE = 4, 30522
TITLES = {'dense': 'BERT', 'distil': 'DistilBERT'}
OVER = {'PyTorch BERT': 'over_torch', 'PyTorch DistilBERT': 'over_torch_distil'}
CLASS_NAMES = ('first', 'second')
LEAVE, STAY = 'leave', 'stay'  # sources of rows, with thresholds


def cases(flags: Any) -> Iterator[tuple[Any, list[Candidate]]]:
  """Yields labels and candidates; other libraries also run a DistilBERT.

  For each length of `flags.length`; the other functions get flags of one.
  """
  # Raises for a wrong flag before anything is timed.
  models = {kind: dense_model(flags, kind) for kind in TITLES}
  libraries = [*peers.usable(flags.candidates, flags.dtype)]
  with tempfile.TemporaryDirectory() as folder:
    for kind, model in models.items() if libraries else ():
      convert.save_model(f'{folder}/{kind}', model, random_params(model))
    for length, batch in itertools.product(flags.length, flags.batch):
      flags = dataclasses.replace(flags, length=length)
      found, tokens = [*candidates(batch, flags)], token_rows(batch, flags)
      items = [{'tokens': row, 'token_types': 0 * row} for row in tokens]
      for library, kind in itertools.product(libraries, TITLES):
        given = library, f'{folder}/{kind}', items, batch, flags.dtype
        name = f'{peers.TITLES[library]} {TITLES[kind]}'
        found.append(Candidate(
          name, functools.partial(peers.make, *given), name, group=kind,
          flops=model_flops(models[kind], flags.length)[0],
          over=OVER.get(name, ''),
        ))  # fmt: skip
      yield {'length': length, 'batch': batch}, found


def panels(table: Sequence[Mapping[str, Any]]) -> list[Panel]:
  """Returns time and FLOPs of a row against its tokens; [] of one length.

  Equations (4) and (5) of EAT, measured. Bands are quartiles of the rounds.
  """
  if len({row['length'] for row in table}) < 2:
    return []
  timed: dict[str, list[Line]] = {}
  counted: dict[str, Line] = {}
  names = dict.fromkeys((row['candidate'], row['batch']) for row in table)
  for name, batch in names:
    rows = [r for r in table if (r['candidate'], r['batch']) == (name, batch)]
    x = np.array([row['length'] for row in rows])
    middle, *ends = 1e3 * np.array([row['seconds'] for row in rows]).T
    lines = timed.setdefault(f'Batch {batch}', [])
    number = counted[name].number if name in counted else len(counted)
    lines.append(Line(name, x, middle, number, (ends[0], ends[1])))
    flops = 1e-9 * np.array([row['flops'] for row in rows])
    counted[name] = Line(name, x, flops, number)
  label = 'tokens of a row'
  times = [Panel(k, 'ms per row', label, one) for k, one in timed.items()]
  return [*times, Panel('FLOPs', 'GFLOPs', label, [*counted.values()])]


def dense_model(flags: Any, kind: str = 'dense') -> Any:
  """Returns a BERT, or a DistilBERT, as an EAT without anything adaptive.

  Raises ConfigError if the depth cannot be timed.
  """
  model = EatClassifier(
    variant=flags.variant, depth=flags.depth or None,
    num_classes=2, dtype=jnp.dtype(flags.dtype),
    prune_layers=(), prune_ratios=(), window=0, exit_layers=(),
  )  # fmt: skip
  depth: Any = model.depth
  if depth <= EXIT_LAYER or depth % 2:
    expected = f'an even number above {EXIT_LAYER}, where rows exit'
    raise ConfigError('depth', depth, expected)
  distil = dict(depth=depth // 2, type_vocab_size=0, pooler_activation='relu')
  return model.clone(**distil if kind == 'distil' else {})


def candidates(batch: int, flags: Any) -> Iterator[Candidate]:
  """Yields the forms of the dense model, and EAT with each rate of exits."""
  model, length = dense_model(flags), flags.length
  tokens = token_rows(batch, flags)
  full, computed = model_flops(model, length)
  for form, used in (('unrolled', full), ('engine', computed)):
    make = functools.partial(_prepare_dense, form, model, tokens)
    name = f'dense {form}'
    yield Candidate(
      name, make, name, is_baseline=True, flops=full, flops_computed=used,
      group='dense',
    )  # fmt: skip
  eat = model.clone(
    prune_layers=(2, 4), prune_ratios=(0.3, 0.3), exit_layers=(EXIT_LAYER,),
    window=flags.window,
  )  # fmt: skip
  for rate in flags.exit_rates if 'eat' in flags.candidates else ():
    full, computed = model_flops(eat, length, (1.0, 1.0 - rate / 100))
    make = functools.partial(_prepare_eat, eat, flags, batch, rate)
    yield Candidate(
      f'EAT {rate} %', make, 'EAT engine', flops=full, flops_computed=computed,
      group='eat',
    )  # fmt: skip


def model_flops(
  model: EatClassifier, length: int, stay: Sequence[float] = (1.0,)
) -> list[float]:
  """Returns the FLOPs of a row: every block in full, and as computed.

  `stay` is the share of the rows that reach each stage.
  """
  given = length, model.static_sizes(length)
  forms = (model.stage_flops(*given, count_cls) for count_cls in (False, True))
  return [float(np.dot(flops, stay)) for flops in forms]


def token_rows(count: int, flags: Any) -> Int[np.ndarray, 'B L']:
  """Returns random token ids; the first rows are the same for any count."""
  shape, rng = (count, flags.length), np.random.default_rng(1)
  return rng.integers(VOCAB_SIZE, size=shape, dtype=np.int32)


def random_params(model: Any) -> dict[str, Any]:
  """Returns nested parameters, the same for the same path and shape.

  Matrices are stored in the compute dtype, to avoid a cast per call: half the
  memory traffic in bfloat16.
  """
  weights_key, noise_key = jax.random.split(jax.random.key(0))
  inputs = np.ones((2, 1, 2), np.int32)
  variables = jax.jit(model.init)(weights_key, *inputs, inputs[0, :, 0])

  def with_noise(leaf: Any) -> Any:
    # With LayerNorm scale 1 all token norms are equal, and rounding would
    # choose which tokens are pruned.
    leaf += 0.02 * jax.random.normal(noise_key, leaf.shape)
    return leaf.astype(model.dtype) if leaf.ndim == 2 else leaf

  return jax.tree.map(with_noise, nn.unbox(variables['params']))


def _prepare_dense(form: str, model: EatClassifier, tokens: Any) -> Call:
  if form == 'engine':
    engine = _engine(model, tokens.shape[1], len(tokens))
    items = [{'tokens': row} for row in tokens]
    ask = functools.partial(answer_all, engine, items)
    logits = np.asarray(log_probabilities(ask()))
    columns = {'backend': engine.warm_up().backend}
    return Call(ask, len(tokens), peers.scores(logits), columns)
  length = np.full(len(tokens), tokens.shape[1], np.int32)
  inputs = {'tokens': tokens, 'token_types': 0 * tokens, 'length': length}
  function = jax.jit(lambda v, x: model.apply(v, **x)[0])
  variables = {'params': random_params(model)}

  def run() -> np.ndarray:
    return np.asarray(function(variables, inputs))

  return Call(run, len(tokens), peers.scores(run()))


def answer_all(engine: Engine, items: Sequence[Any]) -> Sequence[Any]:
  """Answers the items at once; at batch 1 each when the one before is."""
  if engine.grid.capacity > 1:
    return checked(engine.predict(items))
  return checked([engine.submit(item).result() for item in items])


def exits(count: int, rate: int) -> list[bool]:
  """Returns which of `count` rows leave: `rate` percent, spread evenly."""
  return [(n + 1) * rate // 100 > n * rate // 100 for n in range(count)]


def rows_per_call(batch: int, rates: Sequence[int], fill: int) -> int:
  """Returns the rows of one call of the engine: whole batches, exact rates.

  The rows fill at least `fill` batches; at batch 1 `fill` is ignored.
  """
  unit = math.lcm(batch, 100 // math.gcd(100, *rates))
  return unit * math.ceil((fill if batch > 1 else 1) * batch / unit)


@functools.lru_cache(maxsize=1)
def _engine(model: EatClassifier, length: int, batch: int) -> Engine:
  """Returns an engine of random parameters, warm."""
  variables = {'params': random_params(model)}
  chain = EatChain(model, variables, with_unpruned=False)
  # The rule is evaluated for every row, as in service.
  options = ExitOptions(thresholds={LEAVE: 0.0, STAY: math.inf})
  reader = TextReader(None, length)
  policy = ExitPolicy(chain, reader, CLASS_NAMES, (length,), options=options)
  engine = Engine(chain, policy, (length,), doubling(batch))
  engine.warm_up()
  return engine


def _prepare_eat(model: Any, flags: Any, batch: int, rate: int) -> Call:
  """Prepares EAT in the engine with a planned share of exits."""
  rows = rows_per_call(batch, flags.exit_rates, flags.fill)
  engine = _engine(model, flags.length, batch)
  tokens = token_rows(max(batch, peers.CHECKED_ROWS), flags)
  items = [
    {'tokens': tokens[n % len(tokens)], 'source': LEAVE if leave else STAY}
    for n, leave in enumerate(exits(rows, rate))
  ]

  def run() -> None:
    answers = answer_all(engine, items)
    left = sum(answer.depth == EXIT_LAYER for answer in answers)
    if left * 100 != rate * rows:
      raise RuntimeError(f'{left} of {rows} rows left, expected {rate} %')

  first = tokens[: peers.CHECKED_ROWS]
  full = engine.predict([{'tokens': row, 'source': STAY} for row in first])
  scores = peers.scores(log_probabilities(full))
  return Call(run, rows, scores, {'backend': engine.warm_up().backend})
