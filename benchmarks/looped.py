"""Times the engine on looped models and four other ways to halt rows.

  python -m benchmarks.looped --workdir=/tmp/sudoku --depths=depths.csv
  python -m benchmarks.looped --width=256 --depths=depths.csv

`all` runs all iterations of every row, in `slowest` a batch ends when its last
row has halted, `slots` is a Python loop over steps of a batch that refills
finished slots, `one row` runs a row at a time on each core, until it halts, in
XLA or in ONNX Runtime.

With `--workdir` weights, rule and test puzzles come from a run, and `--depths`
is written: the iterations of its rows. Without a run the model is of
6x6 Sudoku, its weights are random and halting is scripted: a checksum of a
question picks the iterations from `--depths`, by default from 1 to 16. `cells`
is the number of cells, of all rows, in which answers differ from those that
`all` iterations in XLA had where the row halts;
`limit` is iterations / mean.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from benchmarks import command
from benchmarks.timing import Call, Candidate
from core import files, machine
from core.errors import ConfigError
from core.fields import flag
from dataset_lib import builder
from eval_lib import report
from halting.rule import namespace
from launch.command_line import Count, Positive, Sizes
from looped.chain import VARIANT, LoopedChain
from looped.model import LoopedModel
from looped.policy import LoopedPolicy, PuzzleReader
from looped.puzzle import Puzzle, puzzle_of
from looped.rules import AnswerRule
from looped.sudoku import Sudoku
from looped.task import chosen
from serve_lib import loops
from serve_lib.chain import Encoded, Grid, Group, checked, doubling
from serve_lib.engine import Engine
from train_lib import loading

BATCH = 256  # rows that are recorded at once
BASE = 16  # generated puzzles; rows are symmetric forms of them
NAMES = 'all', 'slowest', 'slots', 'one row, xla', 'one row, onnxruntime'
SHOWN = NAMES[:4]  # in the table of the docs
OVER = {name: f'over_{re.sub("[, ]+", "_", name)}' for name in NAMES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command.Timing):
  workdir: str = flag('a trained run', '', 'DIRECTORY')
  width: Positive = flag('of the model without a run', 256)
  depths: str = flag('iterations of rows; written of a run', '', 'FILE.csv')
  rows: Positive = flag('puzzles of a call', 512)
  batch: Positive = flag('rows of a full batch', 32)
  iterations: Count = flag("at most; 0: the run's, without a run 16", 0)
  visits: Sizes = flag('iterations of a visit of the loop stage', (1,))
  backends: tuple[Literal['xla', 'onnxruntime'], ...] = flag(
    'of the engine', ('xla', 'onnxruntime')
  )
  results: command.File = flag('writes the table of the docs here', '')


@dataclasses.dataclass(frozen=True)
class Scripted(AnswerRule):
  """Halts a row after the number of iterations that its question picks."""

  depths: tuple[int, ...]

  def stops(self, steps, same, evidence):
    """See the base."""
    question: Any = evidence.question
    rng, size = np.random.default_rng(0), (1, question.shape[1])
    weights = rng.integers(2**16, size=size, dtype=np.int32)
    place = (question * weights).sum(-1) % len(self.depths)
    return steps >= namespace(question).asarray(self.depths)[place]


class TokenPuzzleReader(PuzzleReader):
  """Takes questions that were read: checking a text is not what is timed."""

  def read(self, item: Any, variant: str) -> Encoded:
    context = {'source': '', 'difficulty': 0}
    return Encoded({self.NAME: item[None]}, self.length, variant, context)


def stages_of(chain: LoopedChain) -> Any:
  """Returns the start of tokens `[B, S]`, and an iteration."""
  first, again = (chain.sized(n, VARIANT, ()) for n in range(2))
  name = chain.reader.NAME
  return lambda v, tokens: first(v, {name: tokens[:, None]})[0], again


@functools.partial(jax.jit, static_argnums=(0, 3))
def solve(chain: Any, variables: Any, batches: Any, is_fixed: bool) -> Any:
  """Returns answers `[N, B, S]` and iterations `[N, B]` of N batches."""
  start, again = stages_of(chain)
  step: Any = functools.partial(again, variables)

  def repeat(_: Any, turn: Any) -> Any:
    pick = functools.partial(chosen, turn[1]['running'])
    return jax.tree.map(pick, step(turn[0]), turn)

  def one_batch(tokens: Any) -> Any:
    carry = start(variables, tokens)
    if is_fixed:
      turn = jax.lax.fori_loop(1, chain.limit, repeat, step(carry))
    else:  # until no row is running
      turn = loops.repeat(step, carry, chain.limit)
    return turn[1]['answer'], turn[1]['steps']

  return jax.lax.map(one_batch, batches)


def batched(chain: Any, questions: Any, batch: int, is_fixed: bool) -> Any:
  """Returns answers `[R, S]` and iterations `[R]`."""
  rows, cells = questions.shape
  batches = np.resize(questions, (-(-rows // batch), batch, cells))
  answers, steps = solve(chain, chain.variables, batches, is_fixed)
  return np.asarray(answers).reshape(-1, cells)[:rows], np.ravel(steps)[:rows]


def one_row(chain: Any, questions: Any, backend: str) -> Any:
  pool = concurrent.futures.ThreadPoolExecutor(machine.cores())
  if backend == 'onnxruntime':
    from serve_lib.onnx.program import OnnxStages

    stages = OnnxStages(chain, Grid((1,), (1,)))
  start, again = (Group(n, VARIANT, 1) for n in range(2))

  def answer(question: Any) -> Any:
    if backend == 'xla':
      return batched(chain, question[None], 1, False)[0][0]
    inputs = {chain.reader.NAME: question[None, None]}
    carry, outputs = stages.run(start, 1, inputs)[0], {'running': [True]}
    while outputs['running'][0]:
      carry, outputs = stages.run(again, 1, carry)
    return outputs['answer'][0]

  return lambda: np.stack([*pool.map(answer, questions)])


def slots(chain: Any, questions: Any, batch: int) -> Any:
  @jax.jit
  def step(variables: Any, carry: Any, fresh: Any, tokens: Any) -> Any:
    pick: Any = functools.partial(chosen, fresh)
    return again(variables, jax.tree.map(pick, start(variables, tokens), carry))

  start, again = stages_of(chain)
  first = np.resize(questions, (batch, questions.shape[1]))
  empty = jax.jit(start)(chain.variables, first)

  def run() -> Any:
    answers, waiting = 0 * questions, iter(range(len(questions)))
    owner, tokens, carry = np.full(batch, -1), first.copy(), empty
    while True:
      fresh = np.zeros(batch, bool)
      for slot, number in zip(np.flatnonzero(owner < 0), waiting, strict=False):
        owner[slot], tokens[slot], fresh[slot] = number, questions[number], True
      if (owner < 0).all():
        return answers
      # A copy, as the computation may still read it.
      carry, outputs = step(chain.variables, carry, fresh, tokens.copy())
      done = (owner >= 0) & ~np.asarray(outputs['running'])
      if done.any():
        answers[owner[done]] = np.asarray(outputs['answer'])[done]
        owner[done] = -1

  return run


def engine(
  chain: Any, questions: Any, batch: int, backend: Any, visit: int
) -> Any:
  state = {'params': chain.variables['params'], 'model_state': chain.variables}
  chain = LoopedChain(chain.model, state, chain.reader, visit)
  policy = LoopedPolicy(chain, chain.reader, (), (1,), limit=chain.limit)
  sizes: Any = (1,), doubling(batch)
  served = Engine(chain, policy, *sizes, max_pending=10**6, backend=backend)
  served.warm_up()
  return lambda: checked(served.predict([*questions]))


def cases(flags: Any) -> Iterator[tuple[Any, list[Candidate]]]:
  chain, questions = trained(flags) if flags.workdir else scripted(flags)
  model, batch = chain.model, flags.batch
  answers, steps = batched(chain, questions, batch, True)
  mean = float(steps.mean())
  if flags.workdir and flags.depths:
    report.write_csv(flags.depths, [{'iterations': n} for n in steps.tolist()])

  def candidate(name: str, run: Any) -> Candidate:
    def make() -> Call:
      wrong = tokens(chain.reader.puzzle, run()) != answers
      return Call(run, len(steps), columns={'cells': int(wrong.sum())})

    is_all = name == 'all'
    return Candidate(
      name, make, is_baseline=is_all, over=OVER.get(name, ''),
      flops=model.flops(answers.shape[1:], chain.limit if is_all else mean),
      throughput='rows_per_second',
    )  # fmt: skip

  runs: dict[str, Any] = {
    'all': lambda: batched(chain, questions, batch, True)[0],
    'slowest': lambda: batched(chain, questions, batch, False)[0],
    'slots': slots(chain, questions, batch),
  }
  for backend in dict.fromkeys(('xla', *flags.backends)):
    runs[f'one row, {backend}'] = one_row(chain, questions, backend)
  for options in itertools.product(flags.backends, flags.visits):
    name = 'engine, {}, {} in a visit'.format(*options)
    try:
      runs[name] = engine(chain, questions, batch, *options)
    except ConfigError as error:
      print(f'left out: {error}')
  case = {'width': model.width, 'iterations': chain.limit}
  case['mean'] = f'{mean:.2f}'
  yield case, list(itertools.starmap(candidate, runs.items()))


def tokens(puzzle: Puzzle, answers: Any) -> Any:
  """Returns answers, of an array or of the engine, as tokens."""
  if isinstance(answers, np.ndarray):
    return answers
  return np.array([[*map(puzzle.symbols.index, a.label)] for a in answers])


def recorded(run: Any, questions: Any) -> Any:
  """Returns `Unrolled.outputs` of the questions of rows."""
  outputs = jax.jit(run.task.outputs)
  params, state = run.variables['params'], run.variables['model_state']
  parts = np.array_split(questions, -(-len(questions) // BATCH))
  rows = [outputs(params, state, {'tokens': part}) for part in parts]
  return jax.tree.map(lambda *x: np.concatenate(x), *rows)


def opened(workdir: str, rows: int, **changes: Any) -> Any:
  """Returns a run, its puzzle, and arrays of test rows of changed data."""
  config = loading.load_config(workdir)
  run = loading.restore(workdir, config)
  data = config.dataset.to_dict() | changes
  source: Any = builder.build_source(data, 'test', run.task.info)
  index = np.arange(min(rows, len(source)))
  return run, puzzle_of(data), source.draw(0, 0 * index, index)


def trained(flags: Any) -> Any:
  """Returns a chain of a run, and its test questions `[R, S]`."""
  run, puzzle, arrays = opened(flags.workdir, flags.rows)
  limit = flags.iterations or run.task.model.limit or run.task.model.max_steps
  changes = dict(limit=limit, dtype=jnp.dtype(flags.dtype))
  return chain_of(run, puzzle, **changes), arrays['tokens']


def chain_of(run: Any, puzzle: Puzzle, **changes: Any) -> LoopedChain:
  """Returns a chain of a run whose model has changed fields."""
  model, reader = run.task.model.clone(**changes), TokenPuzzleReader(1, puzzle)
  return LoopedChain(model, run.variables, reader)


def scripted(flags: Any) -> Any:
  puzzle, rng = Sudoku(2, 3), np.random.default_rng(0)
  depths = [*range(1, 17)]
  if flags.depths:
    with files.damage_of(path := pathlib.Path(flags.depths)):
      depths = [int(line) for line in path.read_text().split()[1:]]
  model = LoopedModel(
    num_classes=len(puzzle.symbols), width=flags.width,
    num_heads=max(4, flags.width // 64), dtype=jnp.dtype(flags.dtype),
    limit=flags.iterations or 16, rule=Scripted((*depths,)),
  )  # fmt: skip
  base = [puzzle.generate(rng)[:2] for _ in range(BASE)]
  forms = (puzzle.augment(rng, *base[n % BASE]) for n in range(flags.rows))
  questions = np.stack([question for question, _ in forms])
  variables = nn.unbox(jax.jit(model.init)(jax.random.key(0), questions[:1]))
  state = {'params': variables['params'], 'model_state': variables}
  return LoopedChain(model, state, TokenPuzzleReader(1, puzzle)), questions


def documented(row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a row of the table of the docs."""
  return {
    'width': row['width'], 'candidate': row['candidate'],
    'rows/s': row['rows_per_second'].text(),
    **{f'over {name}': row[OVER[name]].text() for name in SHOWN},
    'limit': f'{row["limit"]:.2f}', 'of the limit': f'{row["share"]:.2f}',
    'cells': row['cells'],
  }  # fmt: skip


main = command.timed('looped', __doc__, Flags, cases, documented=documented)

if __name__ == '__main__':
  raise SystemExit(main())
