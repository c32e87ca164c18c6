"""Times EAT in the engine against dense encoders of three libraries.

  python -m benchmarks.eat_speed --variant=base --batch=1,16,32
  python -m benchmarks.eat_speed --encoder=modernbert --length=500 --batch=1,8
  python -m benchmarks.eat_speed --variant=mini --depth=6

All run the same random weights and token ids, each in a process of its own. EAT
prunes 30 % after layers 2 and 4 (EAT, section 4), and a fixed share of the rows
exits at layer 4.
"""

import dataclasses
import functools
import itertools
import math
import tempfile
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval, MinLen, Predicate
from flax import linen as nn
from jaxtyping import Int

from benchmarks import command, peers, pictures
from benchmarks.timing import Call, Candidate, log_probabilities
from core.errors import ConfigError
from core.fields import flag
from eat.chain import EatChain
from eat.model import Adaptive, EatClassifier, EatModernBert
from eat.policy import ExitPolicy
from eval_lib.plots import Panel
from eval_lib.report import Rows
from launch.command_line import Count, Positive, Sizes
from model_lib import convert
from serve_lib.chain import checked, doubling
from serve_lib.engine import Engine
from serve_lib.items import TextReader

EXIT_LAYER, VOCAB_SIZE = 4, 30522
# Dense models of an encoder.
TITLES = {
  'bert': {'dense': 'BERT', 'distil': 'DistilBERT'},
  'modernbert': {'dense': 'ModernBERT'},
}
OVER = {
  ('torch', 'dense'): 'over_torch',
  ('torch', 'distil'): 'over_torch_distil',
}
CLASS_NAMES = ('first', 'second')
LEAVE, STAY = 'leave', 'stay'  # sources of rows, with thresholds

Even = Annotated[
  int, Predicate(lambda n: n >= 0 and n % 2 == 0), 'even integer'
]
Lengths = Annotated[tuple[command.Length, ...], MinLen(1)]
Percent = Annotated[int, Interval(ge=0, le=100)]
Percents = Annotated[tuple[Percent, ...], MinLen(1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command.Timing):
  encoder: Literal['bert', 'modernbert'] = flag('encoder', 'bert')
  variant: str = flag('sizes: tiny, mini, small, medium, base, ...', 'base')
  depth: Count = flag("layers, even, 6 or more; 0 for the variant's", 0)
  length: Lengths = flag('tokens of every row', (128,))
  batch: Sizes = flag('rows of a batch; 1: one request at a time', (1, 16, 32))
  exit_rates: Percents = flag('percent of exits at layer 4', (0, 50, 80, 95))
  window: Even = flag("tokens of EAT's attention window, even; 0: none", 0)
  candidates: tuple[Literal['dense', 'eat', 'torch', 'onnx'], ...] = flag(
    'candidates to time; dense always is', ('dense', 'eat', 'torch', 'onnx'),
    names='--candidates --contenders',
  )  # fmt: skip
  min_seconds: command.Seconds = flag(
    'least seconds of a candidate per round', 0.5
  )
  fill: Positive = flag('least full batches per call of the engine', 8)
  rounds: Positive = flag('timed rounds', 7, names=command.ROUNDS)


def cases(flags: Any) -> Iterator[tuple[Any, list[Candidate]]]:
  """Yields labels and candidates; other libraries also run a DistilBERT."""
  titles = TITLES[flags.encoder]
  # Raises for a wrong flag before anything is timed.
  models = {kind: dense_model(flags, kind) for kind in titles}
  libraries = [*peers.usable(flags.candidates, flags.dtype)]
  with tempfile.TemporaryDirectory() as folder:
    for kind, model in models.items() if libraries else ():
      convert.save_model(f'{folder}/{kind}', model, random_params(model))
    lengths = sorted({*flags.length})
    for length, batch in itertools.product(lengths, flags.batch):
      timed = [*candidates(length, batch, flags)]
      tokens = token_rows(batch, length)
      items = [{'tokens': row, 'token_types': 0 * row} for row in tokens]
      for library, kind in itertools.product(libraries, titles):
        weights = library, f'{folder}/{kind}', items, batch, flags.dtype
        name = f'{peers.TITLES[library]} {titles[kind]}'
        timed.append(Candidate(
          name, functools.partial(peers.make, *weights), name, group=kind,
          flops=model_flops(models[kind], length)[0],
          over=OVER.get((library, kind), ''),
        ))  # fmt: skip
      yield {'length': length, 'batch': batch}, timed


def panels(table: Rows) -> list[Panel]:
  """Returns time and FLOPs against tokens (EAT, equations 4 and 5)."""
  if len({row['length'] for row in table}) < 2:
    return []
  label, look = 'tokens of a row', dict[str, Any](log='xy', at_points=True)
  result = []
  for batch in dict.fromkeys(row['batch'] for row in table):
    rows = [row for row in table if row['batch'] == batch]
    lines = pictures.lines(rows, 'length', 'seconds', 1e3)
    result.append(Panel(f'Batch {batch}', 'ms per row', label, lines, **look))
  lines = pictures.lines(rows, 'length', 'flops', 1e-9)
  return [*result, Panel('FLOPs', 'GFLOPs of a row', label, lines, **look)]


def dense_model(flags: Any, kind: str = 'dense') -> Any:
  """Returns an encoder, or a DistilBERT, as an EAT with nothing adaptive."""
  is_modern = flags.encoder == 'modernbert'
  encoder: Any = EatModernBert if is_modern else EatClassifier
  model = encoder(
    variant=flags.variant, depth=flags.depth or None,
    num_classes=2, dtype=jnp.dtype(flags.dtype),
    prune_layers=(), prune_ratios=(), exit_layers=(),
    **{} if is_modern else {'window': 0},
  )  # fmt: skip
  depth: Any = model.depth
  if depth <= EXIT_LAYER or depth % 2:
    expected = f'an even number above {EXIT_LAYER}, where rows exit'
    raise ConfigError('depth', depth, expected)
  distil = dict(depth=depth // 2, type_vocab_size=0, pooler_activation='relu')
  return model.clone(**distil if kind == 'distil' else {})


def candidates(length: int, batch: int, flags: Any) -> Iterator[Candidate]:
  """Yields the forms of the dense model, and EAT with each rate of exits."""
  model, tokens = dense_model(flags), token_rows(batch, length)
  full, computed = model_flops(model, length)
  for form, used in (('unrolled', full), ('engine', computed)):
    make = functools.partial(_prepare_dense, form, model, tokens)
    name = f'dense {form}'
    yield Candidate(
      name, make, name, is_baseline=True, flops=full, group='dense',
      columns={'flops': used},
    )  # fmt: skip
  eat = model.clone(
    prune_layers=(2, 4), prune_ratios=(0.3, 0.3), exit_layers=(EXIT_LAYER,),
    **{'window': flags.window} if flags.encoder == 'bert' else {},
  )  # fmt: skip
  for rate in flags.exit_rates if 'eat' in flags.candidates else ():
    full, computed = model_flops(eat, length, (1.0, 1.0 - rate / 100))
    make = functools.partial(_prepare_eat, eat, flags, length, batch, rate)
    yield Candidate(
      f'EAT {rate} %', make, 'EAT engine', flops=full, group='eat',
      columns={'flops': computed},
    )  # fmt: skip


def model_flops(
  model: Adaptive, length: int, stay: Sequence[float] = (1.0,)
) -> list[float]:
  """Returns the FLOPs of a row: every block in full, and as computed.

  `stay` is the share of the rows that reach each stage.
  """
  sizes = length, model.static_sizes(length)
  forms = (model.stage_flops(*sizes, count_cls) for count_cls in (False, True))
  return [float(np.dot(flops, stay)) for flops in forms]


def token_rows(count: int, length: int) -> Int[np.ndarray, 'B L']:
  """Returns random token ids; the first rows are the same for any count."""
  rng = np.random.default_rng(1)
  return rng.integers(VOCAB_SIZE, size=(count, length), dtype=np.int32)


def random_params(model: Any) -> dict[str, Any]:
  """Returns the same parameters for the same path and shape.

  Matrices are stored in the compute dtype, to avoid a cast per call.
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


def _prepare_dense(form: str, model: Adaptive, tokens: Any) -> Call:
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
  """Returns rows of a call: whole batches, at least `fill`, and exact rates."""
  unit = math.lcm(batch, 100 // math.gcd(100, *rates))
  return unit * math.ceil((fill if batch > 1 else 1) * batch / unit)


@functools.lru_cache(maxsize=1)
def _engine(model: Adaptive, length: int, batch: int) -> Engine:
  variables = {'params': random_params(model)}
  chain = EatChain(model, variables, with_unpruned=False)
  # The rule is evaluated for every row, as in service.
  taus = {LEAVE: 0.0, STAY: math.inf}
  reader = TextReader(None, length)
  policy = ExitPolicy(chain, reader, CLASS_NAMES, (length,), thresholds=taus)
  engine = Engine(chain, policy, (length,), doubling(batch))
  engine.warm_up()
  return engine


def _prepare_eat(
  model: Any, flags: Any, length: int, batch: int, rate: int
) -> Call:
  """Prepares EAT in the engine with a planned share of exits."""
  rows = rows_per_call(batch, flags.exit_rates, flags.fill)
  engine = _engine(model, length, batch)
  tokens = token_rows(max(batch, peers.CHECKED_ROWS), length)
  items = [
    {'tokens': tokens[n % len(tokens)], 'source': LEAVE if leave else STAY}
    for n, leave in enumerate(exits(rows, rate))
  ]

  def run() -> None:
    answers = answer_all(engine, items)
    left = sum(answer.fields['depth'] == EXIT_LAYER for answer in answers)
    if left * 100 != rate * rows:
      raise RuntimeError(f'{left} of {rows} rows left, expected {rate} %')

  first = tokens[: peers.CHECKED_ROWS]
  full = engine.predict([{'tokens': row, 'source': STAY} for row in first])
  scores = peers.scores(log_probabilities(full))
  return Call(run, rows, scores, {'backend': engine.warm_up().backend})


main = command.timed('eat_speed', __doc__, Flags, cases, panels)

if __name__ == '__main__':
  raise SystemExit(main())
