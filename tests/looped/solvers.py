"""Served solvers of 4x4 Sudoku: a random model, and one that deduces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dataset_lib.source import DatasetInfo
from looped import sudoku
from looped.model import Iteration, LoopedModel
from looped.sudoku import BLANK, Sudoku
from looped.task import Unrolled
from model_lib.layers import build
from tests.eat import small as small_eat
from train_lib.task import ServedRun

PUZZLE = Sudoku(2, 2)
LIMIT = 18  # of `Solver`
INFO = DatasetInfo(
  'tokens', (16,), 'int32', 6, (), 8, vocab_size=6, label_kind='tags'
)
DATA = {'puzzle': dict(name='looped.sudoku:Sudoku', rows=2, columns=2)}


class Deduction(Iteration):
  """Fills the cells of a row of the board that have one candidate left.

  The n-th iteration fills row n % 4, so that forms of a puzzle take different
  numbers of iterations. The score is 3 for a full board, else below 0.
  """

  def __call__(self, state, tokens):
    """See the base; 'high' counts iterations."""
    self.score(self.head(self.embed(tokens))[:, 0])  # declares the parameters
    count, logits = state['high'][:, 0][:, 0], state['logits']
    board = jnp.where((logits != 0).any(-1), logits.argmax(-1), tokens)
    board = jnp.where(board > 0, board, tokens)
    digits = board[:, :, None] == jnp.arange(2, 6)[None, None]  # [B, S, 4]
    peers = np.zeros((16, 16), bool)
    for unit in sudoku.units(2, 2):
      peers[np.ix_(unit, unit)] = True
    digits = digits.astype(jnp.float32)
    used = jnp.einsum('st,btd->bsd', peers.astype(np.float32), digits)
    free = (used < 0.5).astype(jnp.float32)
    turn = jnp.arange(16)[None] // 4 == count[:, None] % 4
    fills = turn & (board == BLANK) & (free.sum(-1) == 1)
    board = jnp.where(fills, free.argmax(-1) + 2, board)
    blanks = (board == BLANK).sum(-1)
    high = state['high'] + 1
    after = {'high': high, 'logits': jax.nn.one_hot(board, 6)}
    return after, jnp.where(blanks == 0, 3.0, -0.1 - blanks)


class Solver(LoopedModel):
  """Deduces."""

  def setup(self):
    """Declares the iteration; the start is 0."""
    self.iteration = build(Deduction, self)
    self.starts = {
      'high': self.variable('start', 'high', jnp.zeros, (1, self.width))
    }


@functools.cache
def built(kind, **fields):
  """(model, variables as a task has them)."""
  steps = LIMIT if kind is Solver else 12
  reads = 'prefix' if kind is Solver else 'answer'
  sizes = dict(width=16, num_heads=2, depth=1, max_steps=steps)
  fields = sizes | dict(score_reads=reads) | fields
  model = kind(num_classes=6, **fields)
  tokens = jnp.ones((1, 16), jnp.int32)
  drawn = model.init(jax.random.key(0), tokens)
  # Larger parameters, or more iterations, would amplify rounding too far.
  params = small_eat.randomised(drawn['params'], 1, 0.25)
  params['iteration']['score']['bias'] += 0.17
  return model, {'params': params, 'model_state': {'start': drawn['start']}}


def task_of(model, **dataset):
  return small_eat.task(Unrolled, model, INFO, dataset=DATA | dataset)


def served(kind, run=None, **options):
  """(chain, policy) of a kind of model."""
  model, variables = built(kind)
  return task_of(model).serve(variables, options, run or ServedRun())


@functools.cache
def puzzles(count=24):
  return [PUZZLE.generate(np.random.default_rng(n)) for n in range(count)]


def typed(count=24):
  return [PUZZLE.write(example.question) for example in puzzles(count)]
