"""Candidates of `launch.benchmark eat_speed`: EAT, dense BERTs, DistilBERTs.

All run the same random weights and token ids, each in a process of its own. EAT
prunes 30 % after layers 2 and 4 and has an exit at 4 (EAT, section 4), where a
planned share of the rows leaves.
"""

import functools
import itertools
import math
import pathlib
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Int

from dataset_lib import builder
from eat import cost
from eat.model import EatClassifier
from eat.policy import EatPolicy, Options
from eat.serving import FULL, EatChain
from eval_lib import benchmark
from eval_lib.benchmark import Call, Candidate
from launch import export, peers
from model_lib.errors import FieldError
from serve_lib.chain import Failure
from serve_lib.engine import Engine
from serve_lib.grid import doubling
from serve_lib.items import TextReader
from serve_lib.process import keep_freed_memory

EXIT_LAYER, VOCAB_SIZE = 4, 30522
FORMS = ('unrolled', 'engine chain')
TITLES = {'dense': 'BERT', 'distil': 'DistilBERT'}
OVER = {'over_torch': 'PyTorch BERT', 'over_torch_distil': 'PyTorch DistilBERT'}
ENVIRONMENT = {
  'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',  # processes share a GPU
  'HF_HUB_OFFLINE': '1',
  'TF_CPP_MIN_LOG_LEVEL': '3',
}
CLASS_NAMES = ('first', 'second')
LEAVE, STAY = 'leave', 'stay'  # sources of rows, with thresholds
MEDIAN_LENGTH, LENGTH_SPREAD = 24, 0.5  # log-normal, about as in SST-2


def tables(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
  """Yields names and tables of the benchmark; see `launch.benchmark`."""
  dense_model(settings)  # raises for a wrong flag before anything is timed
  libraries = [*peers.usable(settings['candidates'], settings['dtype'])]
  lengths = row_lengths(settings) if settings['length_buckets'] else ()
  with tempfile.TemporaryDirectory() as folder:
    given = settings, libraries, pathlib.Path(folder)
    cases = (({'batch': n}, candidates(n, *given)) for n in settings['batch'])
    yield '', benchmark.tables(cases, settings, OVER, ENVIRONMENT)
  if lengths:
    case = {'rows': len(lengths)}, length_candidates(settings, lengths)
    yield 'lengths', benchmark.tables([case], settings, None, ENVIRONMENT)


def dense_model(settings: Mapping[str, Any], kind: str = 'dense') -> Any:
  """Returns a BERT as an EAT without anything adaptive.

  Of the kind 'distil' it has half the layers, no token types and the pooler of
  DistilBERT. Raises FieldError if the depth cannot be timed.
  """
  model = EatClassifier(
    variant=settings['variant'], depth=settings['depth'] or None,
    num_classes=2, dtype=jnp.dtype(settings['dtype']),
    prune_layers=(), prune_ratios=(), window=0, exit_layers=(),
  )  # fmt: skip
  depth: Any = model.depth
  if depth <= EXIT_LAYER or depth % 2:
    expected = f'an even number above {EXIT_LAYER}, where rows exit'
    raise FieldError('depth', depth, expected)
  if kind == 'dense':
    return model
  return model.clone(
    depth=depth // 2, type_vocab_size=0, pooler_activation='relu'
  )


def candidates(
  batch: int,
  settings: Mapping[str, Any],
  libraries: Iterable[str] = (),
  folder: pathlib.Path = pathlib.Path(),
) -> list[Candidate]:
  """Returns the candidates of a batch size, in the order of the table.

  The `libraries` run the dense model and a DistilBERT, whose weights are
  written into the folder.
  """
  model, length = dense_model(settings), settings['length']
  tokens, found = token_rows(batch, length), []
  full, computed = model_flops(model, length)
  for form in FORMS:
    flops = full, computed if form == 'engine chain' else full
    make = functools.partial(_prepare_dense, form, model, tokens)
    name = f'dense {form}'
    found.append(Candidate(name, make, name, True, flops=flops, group='dense'))
  rates = settings['exit_rates']
  rows = rows_per_call(batch, rates, settings['fill'])
  eat = model.clone(
    prune_layers=(2, 4), prune_ratios=(0.3, 0.3), exit_layers=(EXIT_LAYER,),
    window=settings['window'],
  )  # fmt: skip
  for rate in rates if 'eat' in settings['candidates'] else ():
    flops = model_flops(eat, length, (1.0, 1.0 - rate / 100))
    make = functools.partial(_prepare_eat, eat, length, batch, rate, rows)
    name, process = f'EAT {rate} %', 'EAT engine'
    found.append(Candidate(name, make, process, flops=flops, group='eat'))
  items = [{'tokens': row, 'token_types': 0 * row} for row in tokens]
  for library, kind in itertools.product(libraries, TITLES):
    model, weights = dense_model(settings, kind), folder / kind
    if not weights.exists():
      export.save(str(weights), model, random_params(model))
    given = library, str(weights), items, batch, settings['dtype']
    flops = 2 * model_flops(model, length)[:1]
    make = functools.partial(peers.make, *given)
    name = f'{peers.TITLES[library]} {TITLES[kind]}'
    found.append(Candidate(name, make, name, flops=flops, group=kind))
  return found


def model_flops(
  model: EatClassifier, length: int, stay: Sequence[float] = (1.0,)
) -> tuple[float, float]:
  """Returns the FLOPs of a row: every block in full, and as computed.

  `stay` is the share of the rows that reach each stage.
  """
  sizes = cost.static_sizes(model, length)
  full, computed = (
    float(np.dot(cost.stage_flops(model, length, sizes, count_cls), stay))
    for count_cls in (False, True)
  )
  return full, computed


def token_rows(count: int, length: int) -> Int[np.ndarray, 'B L']:
  """Returns random token ids; the first rows are the same for any count."""
  rng = np.random.default_rng(1)
  return rng.integers(VOCAB_SIZE, size=(count, length), dtype=np.int32)


def _inputs(tokens: Int[np.ndarray, 'B L']) -> dict[str, np.ndarray]:
  length = np.full(len(tokens), tokens.shape[1], np.int32)
  return {'tokens': tokens, 'token_types': 0 * tokens, 'length': length}


def random_params(model: Any) -> dict[str, Any]:
  """Returns nested parameters, the same for the same path and shape.

  They are float32, those of the blocks' matrices in the compute dtype, to
  which every call would round them: half the memory traffic in bfloat16.
  """
  shapes = jax.eval_shape(
    lambda x: nn.unbox(model.init(jax.random.key(0), **x)['params']),
    _inputs(token_rows(1, 2)),
  )

  def draw(path: Any, leaf: Any) -> np.ndarray:
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    # Scales of exactly 1 would give all tokens one norm, and rounding would
    # choose which of them are pruned.
    noise = np.float32(0.02) * rng.standard_normal(leaf.shape, np.float32)
    narrow = name.startswith('block_') and name.endswith('/kernel')
    value = noise + np.float32(name.endswith('scale'))
    return value.astype(model.dtype if narrow else np.float32)

  return jax.tree.map_with_path(draw, shapes)


def _prepare_dense(form: str, model: EatClassifier, tokens: Any) -> Call:
  keep_freed_memory()
  stage = EatChain(model, {}).stage(0, FULL, 0)
  function: Any = jax.jit(lambda v, x: stage(v, x)[1]['logits'])
  if form == 'unrolled':
    function = jax.jit(lambda v, x: model.apply(v, **x)[0])
  variables = {'params': jax.device_put(random_params(model))}

  def run() -> np.ndarray:
    return np.asarray(function(variables, _inputs(tokens)))

  return Call(run, len(tokens), peers.scores(run()))


def leaves(count: int, rate: int) -> list[bool]:
  """Returns which of `count` rows leave: `rate` percent, spread evenly."""
  return [(n + 1) * rate // 100 > n * rate // 100 for n in range(count)]


def rows_per_call(batch: int, rates: Sequence[int], fill: int) -> int:
  """Returns the rows of one call of the engine: whole batches, exact rates.

  They fill `fill` batches at least; at batch 1, one by one, only rates count.
  """
  unit = math.lcm(batch, *(100 // math.gcd(rate, 100) for rate in rates))
  return unit * math.ceil((fill if batch > 1 else 1) * batch / unit)


@functools.lru_cache(maxsize=1)
def _engine(
  model: EatClassifier, lengths: tuple[int, ...], batches: tuple[int, ...]
) -> Engine:
  """Returns an engine of random parameters, warm."""
  keep_freed_memory()
  variables = {'params': jax.device_put(random_params(model))}
  chain = EatChain(model, variables, with_full=False)
  # The rule is asked about every row, as in service.
  options = Options(thresholds={LEAVE: 0.0, STAY: math.inf})
  reader = TextReader(None, lengths[-1])
  policy = EatPolicy(chain, reader, CLASS_NAMES, lengths, options=options)
  engine = Engine(chain, policy, lengths, batches)
  engine.warm_up()
  return engine


def _prepare_eat(
  model: EatClassifier, length: int, batch: int, rate: int, rows: int
) -> Call:
  """Prepares EAT in the engine with a planned share of exits."""
  engine = _engine(model, (length,), doubling(batch))
  tokens = token_rows(max(batch, peers.CHECKED_ROWS), length)
  items = [
    {'tokens': tokens[n % len(tokens)], 'source': LEAVE if leave else STAY}
    for n, leave in enumerate(leaves(rows, rate))
  ]

  def run() -> None:
    if batch == 1:  # a request is sent when the one before was answered
      answers = [engine.submit(item).result() for item in items]
    else:
      answers = engine.predict(items)
    left = sum(answer.depth == EXIT_LAYER for answer in checked(answers))
    if left * 100 != rate * rows:
      raise RuntimeError(f'{left} of {rows} rows left, expected {rate} %')

  first = tokens[: peers.CHECKED_ROWS]
  full = engine.predict([{'tokens': row, 'source': STAY} for row in first])
  shares = [list(one.probabilities.values()) for one in checked(full)]
  return Call(run, rows, peers.scores(np.log(shares)))


def checked(answers: Sequence[Any]) -> Sequence[Any]:
  """Returns the answers; raises RuntimeError if one is a `Failure`."""
  for answer in answers:
    if isinstance(answer, Failure):
      raise RuntimeError(f'no answer: {answer.during}') from answer.error
  return answers


def length_candidates(
  settings: Mapping[str, Any], lengths: Sequence[int]
) -> list[Candidate]:
  """Returns the dense model with all rows padded, and in length buckets."""
  model, capacity = dense_model(settings), min(16, max(settings['batch']))
  buckets = tuple(sorted(settings['length_buckets']))
  # Fewer batch sizes than in service: each is compiled at every length.
  batches = tuple(sorted({*doubling(capacity)[::2], capacity}))
  found = []
  for name, sizes in (('padded', buckets[-1:]), ('buckets', buckets)):
    costs = np.array([model_flops(model, size)[1] for size in sizes])
    flops = 2 * (float(costs[np.searchsorted(sizes, lengths)].mean()),)
    make = functools.partial(_prepare_lengths, model, sizes, batches, lengths)
    baseline = name == 'padded'
    found.append(Candidate(name, make, 'lengths', baseline, flops=flops))
  return found


def _prepare_lengths(
  model: Any, buckets: Any, batches: Any, lengths: Sequence[int]
) -> Call:
  engine, tokens = _engine(model, buckets, batches), token_rows(1, buckets[-1])
  items = [{'tokens': tokens[0, :length]} for length in lengths]
  return Call(lambda: checked(engine.predict(items)), len(items))


def row_lengths(settings: Mapping[str, Any]) -> tuple[int, ...]:
  """Returns the tokens of `length_rows` rows, in random order.

  Of rows evenly spaced over the validation split of a GLUE task, or drawn.
  """
  count, longest = settings['length_rows'], max(settings['length_buckets'])
  rng = np.random.default_rng(0)
  if settings['lengths_from']:
    directory = str(pathlib.Path(settings['lengths_from']).expanduser())
    config = {'name': 'glue', 'task': settings['task'], 'directory': directory}
    own = {'tokenizer': settings['vocabulary'], 'max_length': longest}
    source: Any = builder.build_source(config | own, 'validation')
    picked = np.linspace(0, len(source) - 1, min(count, len(source)))
    lengths = source.records(picked.astype(int))['length']
  else:
    drawn = rng.lognormal(np.log(MEDIAN_LENGTH), LENGTH_SPREAD, count)
    lengths = np.clip(np.rint(drawn), 3, longest).astype(int)
  return tuple(rng.permutation(lengths).tolist())
