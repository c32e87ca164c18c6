"""Puzzles generated from a seed and an index; nothing is stored on disk.

A batch holds

  tokens      int32 [B, S], the question
  label       int32 [B, S], the answer; 0 is ignored
  difficulty  int32 [B], in the unit of the puzzle
"""

import abc
import dataclasses
import functools
import itertools
from typing import Literal

import numpy as np
from jaxtyping import Int

from dataset_lib import source
from dataset_lib.order import record_rng
from looped.puzzle import Example, Puzzle

SPLITS = 'train', 'test', 'validation'
Indices = Int[np.ndarray, ' B']
Rng = np.random.Generator | None


class Transformed(source.Drawn):
  """Puzzles; each epoch transforms the puzzles of a train split again."""

  def describe(self, cells: int, symbols: int, examples: int) -> None:
    """Sets `info`, of puzzles with a number of cells and of tokens."""
    self.info = source.DatasetInfo(
      'tokens', (cells,), 'int32', symbols, (), examples, symbols,
      label_kind='tags',
    )  # fmt: skip

  @abc.abstractmethod
  def example(self, index: int, rng: Rng) -> Example:
    """Returns a puzzle, transformed if there is a generator."""

  def draw(self, seed: int, epochs: Indices, indices: Indices) -> source.Arrays:
    """Returns the arrays of a batch; see the module."""
    pairs = np.zeros((2, len(indices), *self.info.input_shape), np.int32)
    difficulties = np.zeros(len(indices), np.int32)
    is_train = self.split.startswith('train')
    keys = zip(epochs.tolist(), indices.tolist(), strict=True)
    for row, (epoch, index) in enumerate(keys):
      rng = record_rng(seed, epoch, index) if is_train else None
      *pairs[:, row], difficulties[row] = self.example(index, rng)
    tokens, label = pairs
    return {'tokens': tokens, 'label': label, 'difficulty': difficulties}


@functools.cache  # shared by the sources of a process
def table(
  puzzle: Puzzle, data_seed: int, split: str, rows: int
) -> Int[np.ndarray, 'R T']:
  """Returns rows of question, answer, 1 + difficulty; 0 if not made yet.

  One array, as small ones that stay, between the temporaries of a training
  step, keep the memory of these from being used again: 10 GB instead of 2.
  """
  return np.zeros((rows, 2 * puzzle.cells + 1), np.int32)


def generated(puzzle: Puzzle, data_seed: int, split: str, row: int) -> Example:
  """Returns a puzzle of a split: the first drawn whose symmetry class is."""
  rng = record_rng(data_seed, SPLITS.index(split), row)
  drawn = (puzzle.generate(rng) for _ in itertools.count())
  return next(e for e in drawn if puzzle.split_of(e.question) == split)


@dataclasses.dataclass(kw_only=True, eq=False)
class Generated(Transformed):
  """Generated puzzles; none of a split is in another one, nor symmetric.

  Row i of an epoch of training is puzzle i % `base` under a random symmetry.
  """

  split: Literal[SPLITS]
  puzzle: Puzzle
  data_seed: source.Seed = 0
  base: source.Size = 20_000
  train_examples: source.Size = 2**20
  test_examples: source.Size = 1000
  validation_examples: source.Size = 2000

  def __post_init__(self) -> None:
    size = getattr(self, f'{self.split}_examples')
    self.describe(self.puzzle.cells, len(self.puzzle.symbols), size)
    rows = self.base if self.split == 'train' else size
    self._made = table(self.puzzle, self.data_seed, self.split, rows)

  def example(self, index: int, rng: Rng) -> Example:
    """See the base."""
    row = index if rng is None else index % self.base
    made = self._made[row]
    if not made[-1]:  # threads may make a puzzle twice
      drawn = generated(self.puzzle, self.data_seed, self.split, row)
      made[:-1] = np.concatenate([drawn.question, drawn.answer])
      made[-1] = 1 + drawn.difficulty
    question, answer = made[:-1].reshape(2, -1)
    if rng is not None:
      question, answer = self.puzzle.augment(rng, question, answer)
    return Example(question, answer, int(made[-1]) - 1)
