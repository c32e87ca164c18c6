"""The tasks of Graves (2016): targets recomputed from the inputs, in Python."""

import itertools
import math

import numpy as np
import pytest

from core.errors import ConfigError
from dataset_lib import builder

MANY = np.arange(300)
NAME = 'recurrent_act.data:Graves'
TASKS = ('parity', 'logic', 'addition', 'sort', 'sparse_parity')
KEYS = ('inputs', 'valid', 'targets', 'target_mask')


def make(task, split='train', **fields):
  config = dict(name=NAME, task=task, **fields)
  return builder.build_source(config, split)


def rows(task, indices=MANY, **fields):
  """(inputs, targets) of each record as lists, without what is not valid."""
  batch = make(task, **fields).records(indices)
  for row in range(len(indices)):
    length = int(batch['valid'][row].sum())
    assert batch['valid'][row, :length].all()
    for key in KEYS:
      assert not batch[key][row, length:].any()
    asked = batch['target_mask'][row]
    assert not batch['targets'][row, asked == 0].any()
    targets = [
      batch['targets'][row, t].tolist() if asked[t] else None
      for t in range(length)
    ]
    yield batch['inputs'][row, :length].tolist(), targets


@pytest.mark.parametrize('placement', ['scattered', 'leading'])
@pytest.mark.parametrize('length', [1, 5, 64])
def test_parity_counts_the_ones(length, placement):
  counts = []
  for inputs, targets in rows('parity', length=length, placement=placement):
    (vector,) = inputs
    assert len(vector) == length
    assert set(vector) <= {-1.0, 0.0, 1.0}
    assert targets == [[vector.count(1.0) % 2]]
    counts.append(length - vector.count(0.0))
    assert placement == 'scattered' or all(vector[: counts[-1]])
  assert min(counts) == 1
  assert set(counts) == set(range(1, length + 1)) or length == 64


def test_parity_sets_any_numbers_to_any_sign():
  inputs = make('parity').records(np.arange(4000))['inputs'][:, 0]
  # Counts are uniform over 1 .. 64, with a mean of 32.5.
  share = (inputs != 0).mean(0)
  assert (abs(share - 32.5 / 64) < 5 * 0.5 / math.sqrt(4000)).all()
  assert abs((inputs == 1).sum() / (inputs != 0).sum() - 0.5) < 0.01


# Outputs for (p, q) = (0, 0), (0, 1), (1, 0), (1, 1), section 3.2.
GATES = (
  '1000', '0100', '0010', '0110', '1110', '0001', '1001', '1101', '1011',
  '0111',
)  # fmt: skip


@pytest.mark.parametrize('fields', [{}, {'length': 3, 'gates': 2}])
def test_logic_applies_the_gates_in_turn(fields):
  lengths, used = set(), set()
  for inputs, targets in rows('logic', **fields):
    before = None
    for t, vector in enumerate(inputs):
      b0, b1 = bool(vector[0]), bool(vector[1])
      assert not (t and b0)
      b0 = before if t else b0
      chunks = np.reshape(vector[2:], (-1, 10))
      count = int(chunks.sum())
      assert (chunks.sum(1) == (np.arange(len(chunks)) < count)).all()
      for chunk in chunks[:count]:
        b0, b1 = b1, GATES[int(chunk.argmax())][2 * b1 + b0] == '1'
      before = b1
      assert targets[t] == [int(b1)]
      used.add(count)
    lengths.add(len(inputs))
  assert lengths == set(range(1, fields.get('length', 10) + 1))
  assert used == set(range(1, fields.get('gates', 10) + 1))


@pytest.mark.parametrize('fields', [{}, {'length': 3, 'digits': 2}])
def test_addition_sums_so_far(fields):
  lengths, sizes = set(), set()
  places = 3 if fields else 6
  for inputs, targets in rows('addition', **fields):
    total = 0
    for t, vector in enumerate(inputs):
      text = ''
      for digit in np.reshape(vector, (-1, 10)):
        if digit.any():
          assert digit.sum() == 1
          text += str(digit.argmax())
      total += int(text)
      sizes.add(len(text))
      want = [int(digit) for digit in str(total)]
      want += [10] * (places - len(want))
      assert targets[t] == (want if t else None)
    lengths.add(len(inputs))
  assert lengths == set(range(1, fields.get('length', 5) + 1))
  assert sizes == set(range(1, fields.get('digits', 5) + 1))


@pytest.mark.parametrize('length', [2, 15])
def test_sort_asks_for_the_order(length):
  lengths = set()
  for inputs, targets in rows('sort', length=length):
    count = len(inputs) // 2
    numbers = [number for number, _ in inputs[:count]]
    flags = [flag for _, flag in inputs]
    assert flags == [float(t == count - 1) for t in range(2 * count)]
    assert not any(number for number, _ in inputs[count:])
    order = sorted(range(count), key=numbers.__getitem__)
    assert targets == [None] * count + [[place] for place in order]
    lengths.add(count)
  assert lengths == set(range(2, length + 1))


def test_sorted_numbers_are_standard_normal():
  stats = pytest.importorskip('scipy.stats')
  batch = make('sort').records(np.arange(2000))
  shown = (batch['valid'] == 1) & (batch['target_mask'] == 0)
  numbers = batch['inputs'][..., 0][shown].astype(np.float64)
  assert stats.kstest(numbers, 'norm').pvalue > 1e-3


@pytest.mark.parametrize('max_gap', [1, 3])
def test_sparse_parity_announces_the_next_mark(max_gap):
  source = make('sparse_parity', length=12, max_gap=max_gap)
  batch = source.records(MANY)
  gaps, nonsense = set(), set()
  for row in range(len(MANY)):
    parity, next_mark = 0, 0
    for t, vector in enumerate(batch['inputs'][row].tolist()):
      bit, mark, *announced = vector
      assert bit in (-1.0, 1.0)
      assert mark == (t == next_mark) == batch['marked'][row, t]
      if mark:
        assert sum(announced) == 1
        gap = announced.index(1.0)
        gaps.add(gap)
        next_mark = t + gap + 1
        parity ^= bit == 1.0
      else:
        assert not any(announced)
        nonsense.add(bit)
      assert batch['targets'][row, t].tolist() == [parity]
  assert gaps == set(range(max_gap + 1))
  assert nonsense == {-1.0, 1.0}


@pytest.mark.parametrize('task', TASKS)
def test_splits_and_seeds_have_other_records_of_any_number(task):
  sources = [
    make(task, split, data_seed=seed, train_examples=30)
    for seed in (0, 1)
    for split in ('train', 'test')
  ]
  inputs = [source.records(np.arange(20))['inputs'] for source in sources]
  more = make(task, train_examples=10**6).records(np.arange(20))['inputs']
  np.testing.assert_array_equal(inputs[0], more)
  for one, other in itertools.combinations(inputs, 2):
    assert (one != other).any(axis=(1, 2)).mean() > 0.8


@pytest.mark.parametrize(
  ('task', 'shape', 'classes', 'targets'),
  [
    ('parity', (1, 64), 2, 1), ('logic', (10, 102), 2, 1),
    ('addition', (5, 50), 11, 6), ('sort', (30, 2), 15, 1),
    ('sparse_parity', (20, 6), 2, 1),
  ],
)  # fmt: skip
def test_sizes_are_those_of_the_paper(task, shape, classes, targets):
  source = make(task, 'test')
  info = source.info
  assert (info.input_key, info.input_dtype) == ('inputs', 'float32')
  assert (info.input_shape, info.num_classes) == (shape, classes)
  assert len(source) == info.num_examples == 2048
  batch = source.records(MANY)
  assert batch['inputs'].shape == (300, *shape)
  assert batch['targets'].shape == (300, shape[0], targets)
  assert 0 <= batch['targets'].min() <= batch['targets'].max() == classes - 1
  dtypes = [batch[key].dtype for key in KEYS]
  assert dtypes == [np.float32, np.float32, np.int32, np.float32]


@pytest.mark.parametrize(
  ('fields', 'key', 'expected'),
  [
    (dict(task='sort', length=1), 'dataset.length', 'at least 2'),
    (dict(task='sort', digits=3), 'dataset.digits', 'has only length'),
    (dict(task='logic', placement='leading'), 'dataset.placement', 'nothing'),
  ],
)
def test_a_bad_field_is_named(fields, key, expected):
  with pytest.raises(ConfigError, match=f'{key}: expected .*{expected}'):
    make(**fields)
