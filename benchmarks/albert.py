"""Times ALBERT whose tokens halt against fixed depth.

  python -m benchmarks.albert --variant=small --batch=1,8

One device, random tokens. With random parameters the halting score is set so
that tokens take a given share of the iterations on average. The time depends
only on the steps in which tokens halt.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from albert_act.chain import AlbertChain
from albert_act.model import AlbertClassifier
from albert_act.policy import HaltingPolicy
from benchmarks import command
from benchmarks.timing import Call, Candidate, log_probabilities
from core.fields import flag
from halting.token_rules import Fixed
from launch.command_line import Positive, Sizes
from serve_lib.decisions import ClassifierPolicy, OneStage
from serve_lib.engine import Engine
from serve_lib.items import TOKEN_IDS

VOCAB_SIZE = 1000
SPREAD = 2.0  # standard deviation of the first scores' logits
BIASES = np.linspace(-12.0, 12.0, 4097)  # of the halting score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command.Timing):
  variant: str = flag('micro, mini, tiny, small or base', 'small')
  length: command.Length = flag('tokens of a row', 128)
  batch: Sizes = flag('rows at a time', (1, 8))
  shares: tuple[command.Share, ...] = flag(
    'mean over most iterations', (0.42, 0.25)
  )
  iterations: Positive = flag('iterations of a visit of the engine', 12)
  queue: Positive = flag('batches of rows that the engine has at once', 1)


def cases(flags: Any) -> Iterator[tuple[Any, list[Candidate]]]:
  for batch, mean in itertools.product(flags.batch, flags.shares):
    model, variables, inputs, steps = prepare(batch * flags.queue, mean, flags)
    fixed = model.clone(rule=Fixed())
    forms = {
      'fixed, scanned': fixed.apply,
      'fixed, unrolled': functools.partial(fixed.apply, method=_unroll),
      'masked': model.apply,
      'dynamic': model.clone(dynamic=True).apply,
    }
    runs: dict[str, Any] = {}
    for name, apply in forms.items():
      form = jax.jit(functools.partial(_logits, apply))
      runs[name] = functools.partial(form, variables, *inputs)
    chain = AlbertChain(model, variables, iterations=flags.iterations)
    runs['engine'] = _engine(HaltingPolicy, chain, inputs, batch)
    one_stage = OneStage(functools.partial(_named, fixed), variables, TOKEN_IDS)
    runs['fixed, engine'] = _engine(ClassifierPolicy, one_stage, inputs, batch)
    shares = {'mean_share': steps.mean(), 'depth_share': steps.max(1).mean()}
    columns = {k: float(v) / model.max_iterations for k, v in shares.items()}
    candidates = []
    for name, run in runs.items():
      is_fixed, output = name.startswith('fixed'), jax.nn.log_softmax(run())
      # FLOPs at the measured mean iterations, if the model halts.
      needed = None if is_fixed else float(steps.mean())
      cost = (fixed if is_fixed else model).flops(inputs[0].shape[1:], needed)
      candidates.append(Candidate(
        name, functools.partial(Call, run, 1, output, columns), flops=cost,
        is_baseline=is_fixed, group='fixed' if is_fixed else 'halting',
      ))  # fmt: skip
    yield {'batch': batch, 'mean': mean}, candidates


def _logits(apply: Any, *args: Any) -> Any:
  return apply(*args)[0]


def _named(model: Any, variables: Any, inputs: Any) -> Any:
  return model.apply(variables, **inputs, method=_unroll)[0]


def prepare(batch: int, mean: float, flags: Any) -> Any:
  """Returns (model, variables, inputs, iterations `[B, L]` of this mean)."""
  length, rng = flags.length, np.random.default_rng(0)
  model = AlbertClassifier(
    variant=flags.variant, vocab_size=VOCAB_SIZE, max_positions=length,
    dtype=jnp.dtype(flags.dtype),
  )  # fmt: skip
  inputs = (
    jnp.asarray(rng.integers(1, VOCAB_SIZE, (batch, length), dtype=np.int32)),
    jnp.zeros((batch, length), jnp.int32),
    jnp.full((batch,), length, jnp.int32),
  )
  params = nn.unbox(jax.jit(model.init)(jax.random.key(0), *inputs))['params']
  # A score of random direction and fixed spread over the first states.
  once: Any = model.clone(rule=Fixed(), max_iterations=1)
  first = once.apply({'params': params}, *inputs, method='encode').states
  states = first.astype(jnp.float32).reshape(-1, model.width)
  kernel = jax.random.normal(jax.random.key(1), (model.width, 1))
  kernel = SPREAD * kernel / (states @ kernel).std()
  center = (states @ kernel).mean(0)

  def with_bias(bias: Any) -> Any:
    score = {'kernel': kernel, 'bias': bias - center}
    return {'params': params | {'score': score}}

  @jax.jit
  def taken(bias: Any) -> Any:
    out = model.apply(with_bias(bias), *inputs)[1]
    return out['ponder']['steps']

  wanted = mean * model.max_iterations
  place = bisect.bisect_left(
    BIASES[:-1], -wanted, key=lambda bias: -float(taken(bias).mean())
  )
  bias = BIASES[place]
  return model, with_bias(bias), inputs, np.asarray(taken(bias))


def _unroll(module: Any, tokens: Any, token_types: Any, length: Any) -> Any:
  """Runs a model of fixed depth as a program without a loop."""
  x = module.embed(tokens, token_types)
  valid = jnp.arange(tokens.shape[1])[None] < length[:, None]
  for _ in range(module.max_iterations):
    x = module.block[0](x, valid).x
  return module.classify(x[:, 0])


def _engine(kind: Any, chain: Any, inputs: Any, batch: int) -> Any:
  """Returns a function that answers all rows at once: log-probabilities."""
  length = inputs[0].shape[1]
  policy = kind(chain, TOKEN_IDS, ('first', 'second'), (length,))
  engine = Engine(chain, policy, (length,), (batch,))
  print(f'{kind.__name__}: in {engine.warm_up().backend}')
  items = [{'tokens': row} for row in np.asarray(inputs[0])]
  return lambda: log_probabilities(engine.predict(items))


main = command.timed('albert', __doc__, Flags, cases)

if __name__ == '__main__':
  raise SystemExit(main())
