"""Sources of puzzles: the contract of data sets, and disjoint splits."""

import numpy as np
import pytest

from dataset_lib import builder
from looped.data import SPLITS
from looped.maze import Maze
from looped.sudoku import Sudoku
from tests.dataset_lib.sources_test import (  # noqa: F401  of all sources
  test_a_batch_depends_on_seed_and_step_alone,
  test_evaluation_is_one_padded_pass,
  test_rows_are_the_records_that_their_index_names,
  test_shapes_without_data_are_of_its_batches,
)
from tests.looped.files_test import write_arc, write_csv

PUZZLES = {
  'sudoku': dict(name='looped.sudoku:Sudoku', rows=2, columns=3),
  'maze': dict(name='looped.maze:Maze', side=7),
}
SIZES = dict(
  train_examples=50, test_examples=13, validation_examples=40, base=20
)


def generated(name, **fields):
  puzzle = PUZZLES[name]
  return dict(name='looped.data:Generated', puzzle=puzzle) | SIZES | fields


@pytest.fixture(scope='module', params=[*PUZZLES, 'csv', 'arc'])
def config(request, tmp_path_factory):
  path = tmp_path_factory.mktemp('puzzles')
  if request.param in PUZZLES:
    return generated(request.param)
  if request.param == 'arc':
    return write_arc(path, pairs=15)
  return write_csv(path, train=30, test=5)[1]


def rows(config, split, epoch=0, seed=0):
  source = builder.build_source(config, split)
  indices = np.arange(len(source))
  return source.draw(seed, np.full_like(indices, epoch), indices)


@pytest.mark.parametrize('name', PUZZLES)
def test_puzzles_are_solved_and_no_class_is_in_two_splits(name):
  puzzle = {'sudoku': Sudoku(2, 3), 'maze': Maze(7)}[name]
  splits = {split: rows(generated(name), split) for split in SPLITS}
  kinds = {}
  for split, batch in splits.items():
    assert puzzle.solved(batch['tokens'], batch['label']).all()
    assert puzzle.blank(batch['tokens']).any(1).all()
    kinds[split] = {*map(puzzle.signature, batch['tokens'])}
  assert sum(map(len, kinds.values())) == len(set.union(*kinds.values()))
  assert len(kinds['train']) == SIZES['base']
  # Rows i and i + base are one puzzle, transformed in two ways.
  train = splits['train']
  assert (train['difficulty'][:20] == train['difficulty'][20:40]).all()
  differ = (train['tokens'][:20] != train['tokens'][20:40]).any(1)
  assert differ.sum() > 15


def test_training_is_transformed_anew_and_the_test_split_never():
  config = generated('sudoku')
  for split, is_equal in (('train', False), ('test', True)):
    first = rows(config, split)['tokens']
    for other in (dict(epoch=1), dict(seed=1)):
      equal = (rows(config, split, **other)['tokens'] == first).all(1)
      assert equal.all() if is_equal else not equal.any()
  other = rows(generated('sudoku', data_seed=1), 'test')['tokens']
  assert not (other == first).all(1).any()
