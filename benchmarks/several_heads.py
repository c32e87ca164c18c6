"""Times three tasks by one EAT against three EATs, one after the other.

  python -m benchmarks.several_heads --out=several_heads.csv
  python -m benchmarks.several_heads --variant=minilm --length=32 --batch=1

The heads of the three have the random weights of the one, cut by task, and all
run in the engine. A fixed share of the rows leaves each task at layer 4, drawn
for each task alone: `all_left_percent` are the rows that all tasks leave, which
are those that end there. Each answer is compared with that of its own model.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command, eat_speed
from benchmarks.eat_speed import CLASS_NAMES, EXIT_LAYER, random_params
from benchmarks.timing import Call, Candidate
from core.fields import flag
from dataset_lib.source import tasks_of
from eat.chain import EatChain
from eat.model import EatClassifier
from eat.policy import ExitPolicy
from eat.several_policy import SeveralPolicy
from launch.command_line import Positive, Sizes
from serve_lib.chain import doubling
from serve_lib.engine import Engine
from serve_lib.items import TextReader

TASKS = ('domain', 'jailbreak', 'language')
NAMES = tuple(f'{task}={name}' for task in TASKS for name in CLASS_NAMES)
TOLERANCE = 1e-5  # of probabilities, float32
UNIT = 20  # rows, whose multiples have any share of 5 %


@dataclass(frozen=True, kw_only=True)
class Flags(command.Timing):
  variant: tuple[Literal['minilm', 'medium', 'base'], ...] = flag(
    'sizes of the encoder', ('minilm', 'base')
  )
  length: eat_speed.Lengths = flag('tokens of every row', (32, 128))
  batch: Sizes = flag('rows of a batch; 1: one request at a time', (1, 8))
  exit_rates: eat_speed.Percents = flag(
    'percent that leave a task', (0, 50, 80)
  )
  rounds: Positive = flag('timed rounds', 5, names=command.ROUNDS)
  fill: Positive = flag('calls ask this multiple of the fewest rows', 1)


def cases(flags: Any) -> Iterator[tuple[Any, list[Candidate]]]:
  """Yields labels, and for each rate of exits three models and one."""
  for variant, length, batch in itertools.product(
    flags.variant, flags.length, flags.batch
  ):
    rows = flags.fill * math.lcm(batch, UNIT)
    timed = []
    for rate in flags.exit_rates:
      names = [f'{count} {rate} %' for count in ('three', 'one')]
      share = 100 * plans(rows, rate).count('1' * len(TASKS)) / rows
      for name in names:
        make = functools.partial(
          prepare, name == names[1], variant, flags.dtype, length, batch, rate,
          rows,
        )  # fmt: skip
        timed.append(Candidate(
          name, make, 'EAT', is_baseline=name == names[0], baseline=names[0],
          columns={'all_left_percent': share},
        ))  # fmt: skip
    yield dict(variant=variant, length=length, batch=batch), timed


def plans(rows: int, rate: int) -> list[str]:
  """Returns which tasks a row leaves, as '101', `rate` percent for each."""
  left = np.array(eat_speed.exits(rows, rate)).astype(int).astype(str)
  rngs = map(np.random.default_rng, range(len(TASKS)))
  return [*map(''.join, zip(*(r.permutation(left) for r in rngs), strict=True))]


@functools.lru_cache(maxsize=1)
def engines(variant: str, dtype: str, length: int, batch: int) -> Any:
  """Returns an engine of all tasks, and a list: one for each, same weights."""
  model = EatClassifier(
    variant=variant, num_classes=len(NAMES), dtype=jnp.dtype(dtype), window=0,
    prune_layers=(2, 4), prune_ratios=(0.3, 0.3), exit_layers=(EXIT_LAYER,),
  )  # fmt: skip
  params, reader = random_params(model), TextReader(None, length)
  every = [*map(''.join, itertools.product('01', repeat=len(TASKS)))]

  def engine(model: Any, params: Any, policy: Any, *names: Any, **options: Any):
    chain = EatChain(model, {'params': params}, with_unpruned=False)
    built = policy(chain, reader, *names, (length,), **options)
    made = Engine(chain, built, (length,), doubling(batch))
    made.warm_up()
    return made

  tasks, alone = {}, []
  for task, classes in tasks_of(NAMES).items():
    # The source of a row says which tasks it leaves.
    left = {p: 0.0 if p[TASKS.index(task)] == '1' else math.inf for p in every}
    tasks[task] = {'class_names': CLASS_NAMES, 'thresholds': left}
    small = model.clone(num_classes=len(CLASS_NAMES))
    # The columns of the task of the last layer of each head.
    part = jax.tree_util.tree_map_with_path(
      lambda path, leaf, classes=classes: (
        leaf[..., classes] if path[-2].key == 'head' else leaf
      ),
      params,
    )
    alone.append(engine(small, part, ExitPolicy, CLASS_NAMES, thresholds=left))
  return engine(model, params, SeveralPolicy, NAMES, tasks=tasks), alone


def prepare(
  is_one: bool, variant: str, dtype: str, length: int, batch: int, rate: int,
  rows: int,
) -> Call:  # fmt: skip
  """Prepares an engine for all tasks, or an engine for each task."""
  joint, alone = engines(variant, dtype, length, batch)
  tokens = eat_speed.token_rows(rows, length)
  items = [
    {'tokens': row, 'source': plan}
    for row, plan in zip(tokens, plans(rows, rate), strict=True)
  ]
  if is_one:
    compare(joint.predict(items), [engine.predict(items) for engine in alone])
  asked = [joint] if is_one else alone

  def run() -> None:
    for engine in asked:
      eat_speed.answer_all(engine, items)

  return Call(run, rows, None, {'backend': joint.warm_up().backend})


def compare(together: Sequence[Any], alone: Sequence[Sequence[Any]]) -> None:
  """Raises RuntimeError where a task has another answer than its model."""
  for task, answers in zip(TASKS, alone, strict=True):
    for answer, expected in zip(together, answers, strict=True):
      got = answer.tasks[task]
      ours, theirs = ([*x.probabilities.values()] for x in (got, expected))
      same = got.label == expected.label
      same &= got.fields == expected.fields
      if not same or not np.allclose(ours, theirs, rtol=0, atol=TOLERANCE):
        raise RuntimeError(f'{task}: expected {expected}, got {got}')


main = command.timed('several_heads', __doc__, Flags, cases)

if __name__ == '__main__':
  raise SystemExit(main())
