"""Synthetic sequences of Graves (2016), and one with inputs to skip.

Parity, logic, addition and sort of "Adaptive Computation Time for Recurrent
Neural Networks" (arXiv:1603.08983, sections 3.1 to 3.4), and `sparse_parity`.
Sequences are padded to the longest of the task. A batch holds

  inputs       float32 [B, T, E]
  valid        float32 [B, T], 1 for an input, 0 for padding
  targets      int32 [B, T, G], classes of the G targets of a step
  target_mask  float32 [B, T], 1 for a step with targets

and of sparse_parity `marked` float32 [B, T]. A record is a function of
(data_seed, split, index) and of the fields of the task.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Interval
from jaxtyping import Bool, Float, Int, UInt64

from dataset_lib.errors import ConfigError
from dataset_lib.order import record_bits
from dataset_lib.source import DatasetInfo, Seed, Size, TrainTest

NUM_DIGITS = 10
BLANK = 10  # class of the places after the last digit of a sum
SPLITS = ('train', 'test')

Bits = UInt64[np.ndarray, 'B N']

# A task has `input_shape`, `num_classes`, `num_targets`; `records` makes arrays
# from `num_draws` random numbers for each record.

# Table 1 of the paper: values for (P, Q) = TT, TF, FT, FF of nor, xq, abj, xor,
# nand, and, xnor, if/then, then/if, or; as GATES[gate, p, q].
GATES = np.array([
  *((0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0), (0, 1, 1, 0), (0, 1, 1, 1)),
  *((1, 0, 0, 0), (1, 0, 0, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)),
])[:, ::-1].reshape(-1, 2, 2)  # fmt: skip


def integers(bits: np.ndarray, low: int, high: int) -> Int[np.ndarray, '*S']:
  """Returns numbers uniform over low .. high, both included, to 2**-32."""
  count = np.uint64(high - low + 1)
  drawn = ((bits >> np.uint64(32)) * count) >> np.uint64(32)
  return drawn.astype(np.int64) + low


def normals(
  bits: UInt64[np.ndarray, '*S'], more_bits: UInt64[np.ndarray, '*S']
) -> Float[np.ndarray, '*S']:
  """Returns standard normal numbers (Box and Muller, 1958)."""
  # In (0, 1], as the logarithm needs, with 53 bits.
  uniform = ((bits >> np.uint64(11)) + np.uint64(1)).astype(np.float64) / 2**53
  angle = (more_bits >> np.uint64(11)).astype(np.float64) / 2**53
  return np.sqrt(-2.0 * np.log(uniform)) * np.cos(2.0 * np.pi * angle)


def arrays(
  inputs: np.ndarray,
  valid: Bool[np.ndarray, 'B T'],
  targets: Int[np.ndarray, 'B T G'],
  has_target: Bool[np.ndarray, 'B T'],
) -> dict[str, np.ndarray]:
  """Returns the arrays of a batch, with zeros where there is no value."""
  return {
    'inputs': np.where(valid[..., None], inputs, 0).astype(np.float32),
    'valid': valid.astype(np.float32),
    'targets': np.where(has_target[..., None], targets, 0).astype(np.int32),
    'target_mask': has_target.astype(np.float32),
  }


def leading(count: np.ndarray, length: int) -> Bool[np.ndarray, '*S L']:
  """Marks the first `count` [*S] places of `length`."""
  return np.arange(length) < count[..., None]


class _Parity:
  """Section 3.1: one vector, of which some numbers are 1 or -1 and the rest 0.

  The target is 1 if the number of 1s is odd. The count of set numbers is
  uniform over 1 .. `length`. `placement` 'scattered' sets numbers anywhere, as
  the paper's "randomly"; 'leading' sets the first ones, as the code of Fojo's
  thesis does, which is easier to learn.
  """

  num_classes, num_targets = 2, 1

  def __init__(self, length: int, placement: str):
    self.input_shape = (1, length)
    self.num_draws = 1 + 2 * length
    self._scattered = placement == 'scattered'

  def records(self, bits: Bits) -> dict[str, np.ndarray]:
    length = self.input_shape[1]
    count = integers(bits[:, :1], 1, length)
    order, signs = bits[:, 1 : length + 1], bits[:, length + 1 :]
    if self._scattered:
      # The places of the `count` smallest random numbers: a random subset.
      last = np.take_along_axis(np.sort(order, axis=1), count - 1, axis=1)
      is_set = order <= last
    else:
      is_set = leading(count[:, 0], length)
    numbers = np.where(is_set, 2 * integers(signs, 0, 1) - 1, 0)
    odd = np.count_nonzero(numbers == 1, axis=1) % 2
    everywhere = np.ones((len(bits), 1), bool)
    return arrays(numbers[:, None], everywhere, odd[:, None, None], everywhere)


class _Logic:
  """Section 3.2: chains of binary gates, each vector on the last one's result.

  A vector begins with the bits b0 and b1, then come one-hot indices into
  `GATES`, of 1 to `gates` gates, and zeros. Its target is b_{B+1},
  where b_{i+1} = T_i(b_i, b_{i-1}) (equation 21). From the second vector on b0
  is the target before, and 0 in the input.
  """

  num_classes, num_targets = 2, 1

  def __init__(self, length: int, gates: int):
    self._gates = gates
    self.input_shape = (length, 2 + gates * len(GATES))
    # The number of vectors and b0; of each vector b1, B and its gates.
    self.num_draws = 2 + length * (2 + gates)

  def records(self, bits: Bits) -> dict[str, np.ndarray]:
    rows, (length, width) = len(bits), self.input_shape
    valid = leading(integers(bits[:, 0], 1, length), length)
    drawn = bits[:, 2:].reshape(rows, length, -1)
    count = integers(drawn[..., 1], 1, self._gates)
    gates = integers(drawn[..., 2:], 0, len(GATES) - 1)
    used = leading(count, self._gates)
    inputs = np.zeros((rows, length, width))
    inputs[:, 0, 0] = before = integers(bits[:, 1], 0, 1)
    inputs[:, :, 1] = second = integers(drawn[..., 0], 0, 1)
    one_hot = np.eye(len(GATES))[gates] * used[..., None]
    inputs[:, :, 2:] = one_hot.reshape(rows, length, -1)
    targets = np.zeros((rows, length, 1), np.int64)
    for t in range(length):
      b0, b1 = before, second[:, t]
      for i in range(self._gates):  # b_{i+1} = T_i(b_i, b_{i-1})
        result, is_gate = GATES[gates[:, t, i], b1, b0], used[:, t, i]
        b0, b1 = np.where(is_gate, b1, b0), np.where(is_gate, result, b1)
      targets[:, t, 0] = before = b1
    return arrays(inputs, valid, targets, valid)


class _Addition:
  """Section 3.3: the running sum of numbers of 1 to `digits` decimal digits.

  A number is a one-hot vector per digit, the most significant first, then
  zeros; it may begin with 0s. The target is the sum so far, digit by digit,
  then the class `BLANK`. The first number has none.
  """

  num_classes = NUM_DIGITS + 1

  def __init__(self, length: int, digits: int):
    self._digits = digits
    self.input_shape = (length, digits * NUM_DIGITS)
    self.num_targets = len(str(length * (10**digits - 1)))
    self.num_draws = 1 + length * (1 + digits)

  def records(self, bits: Bits) -> dict[str, np.ndarray]:
    rows, (length, _) = len(bits), self.input_shape
    valid = leading(integers(bits[:, 0], 1, length), length)
    drawn = bits[:, 1:].reshape(rows, length, -1)
    used = leading(integers(drawn[..., 0], 1, self._digits), self._digits)
    digits = integers(drawn[..., 1:], 0, NUM_DIGITS - 1)
    numbers = np.zeros((rows, length), np.int64)
    for place in range(self._digits):
      longer = 10 * numbers + digits[..., place]
      numbers = np.where(used[..., place], longer, numbers)
    one_hot = np.eye(NUM_DIGITS)[digits] * used[..., None]
    sums = np.cumsum(numbers, axis=1)
    return arrays(
      one_hot.reshape(rows, length, -1),
      valid,
      decimal_places(sums, self.num_targets),
      valid & (np.arange(length)[None] > 0),
    )


class _Sort:
  """Section 3.4: the order of 2 to `length` standard normal numbers.

  An input is a number and a flag, which is 1 at the last number. As many
  inputs of zeros follow, whose targets are the places (from 0) of the numbers
  in ascending order.
  """

  num_targets = 1

  def __init__(self, length: int):
    self._length = length
    self.input_shape = (2 * length, 2)
    self.num_classes = length
    self.num_draws = 1 + 2 * length

  def records(self, bits: Bits) -> dict[str, np.ndarray]:
    rows, most = len(bits), self._length
    length = integers(bits[:, :1], 2, most)
    numbers = normals(bits[:, 1 : most + 1], bits[:, most + 1 :])
    # Rounded as the network sees them, so that the target is their order.
    numbers = numbers.astype(np.float32)
    places = np.arange(2 * most)[None]
    shown, asked = places < length, (places >= length) & (places < 2 * length)
    inputs = np.zeros((rows, 2 * most, 2), np.float32)
    inputs[:, :most, 0] = np.where(shown[:, :most], numbers, 0)
    inputs[:, :, 1] = places == length - 1
    # What is not shown sorts to the end.
    unused_last = np.where(shown[:, :most], numbers, np.inf)
    order = np.argsort(unused_last, axis=1, kind='stable')
    targets = np.take_along_axis(
      order, np.clip(places - length, 0, most - 1), axis=1
    )
    return arrays(inputs, shown | asked, targets[..., None], asked)


class _SparseParity:
  """The parity of few marked bits; how far off the next one is, is announced.

  Not of Graves (2016): a task for Skip-ACT, which decides to skip an input
  before it has seen it. An input is (bit, mark, one-hot number of unmarked
  inputs that follow). Bits are 1 or -1; those of unmarked inputs are noise. The
  target at every input is 1 if an odd number of marked bits so far were 1. The
  first input is marked; after each marked one come 0 to `max_gap` unmarked
  ones, uniformly.
  """

  num_classes, num_targets = 2, 1

  def __init__(self, length: int, max_gap: int):
    self._max_gap = max_gap
    self.input_shape = (length, 2 + max_gap + 1)
    self.num_draws = 2 * length

  def records(self, bits: Bits) -> dict[str, np.ndarray]:
    rows, (length, width) = len(bits), self.input_shape
    gaps = integers(bits[:, :length], 0, self._max_gap)
    ones = integers(bits[:, length:], 0, 1)
    # The gap drawn at number i is that after the i-th marked input.
    starts = np.cumsum(gaps + 1, axis=1) - gaps - 1
    marked = np.zeros((rows, length), bool)
    row, number = np.nonzero(starts < length)
    marked[row, starts[row, number]] = True
    inputs = np.zeros((rows, length, width))
    inputs[..., 0] = 2 * ones - 1
    inputs[..., 1] = marked
    inputs[row, starts[row, number], 2 + gaps[row, number]] = 1
    targets = np.cumsum(ones * marked, axis=1) % 2
    everywhere = np.ones((rows, length), bool)
    batch = arrays(inputs, everywhere, targets[..., None], everywhere)
    return batch | {'marked': marked.astype(np.float32)}


def decimal_places(numbers: np.ndarray, places: int) -> np.ndarray:
  """Returns digits, the most significant first, then `BLANK`s."""
  digits = [np.ones_like(numbers)]
  for place in range(1, places):
    digits.append(digits[-1] + (numbers >= 10**place))
  count = digits[-1]  # digits of each number; 0 has one
  result = np.full((*numbers.shape, places), BLANK)
  for place in range(places):
    power = 10 ** np.maximum(count - 1 - place, 0)
    result[..., place] = np.where(place < count, numbers // power % 10, BLANK)
  return result


# Fields of each task with the paper's values, and the least value of `length`.
TASKS: dict[str, tuple[type[Any], dict[str, Any], int]] = {
  'parity': (_Parity, {'length': 64, 'placement': 'scattered'}, 1),
  'logic': (_Logic, {'length': 10, 'gates': 10}, 1),
  'addition': (_Addition, {'length': 5, 'digits': 5}, 1),
  'sort': (_Sort, {'length': 15}, 2),
  'sparse_parity': (_SparseParity, {'length': 20, 'max_gap': 3}, 1),
}


@dataclasses.dataclass(kw_only=True, eq=False)
class Graves:
  """Sequences of one task and split, computed on demand.

  Fields of the task that are not given have the paper's values. `data_seed`
  selects the streams, independent of the run's seed, so that runs with
  different seeds share one test set.
  """

  split: TrainTest
  task: Literal['parity', 'logic', 'addition', 'sort', 'sparse_parity']
  length: Annotated[int, Interval(ge=1, le=4096)] | None = None
  gates: Annotated[int, Interval(ge=1, le=100)] | None = None
  digits: Annotated[int, Interval(ge=1, le=15)] | None = None  # 64-bit sums
  max_gap: Annotated[int, Interval(ge=0, le=100)] | None = None
  placement: Literal['scattered', 'leading'] | None = None
  data_seed: Seed = 0
  train_examples: Size = 2**20
  test_examples: Size = 2048

  @staticmethod
  def check_fields(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a field of another task, or too short a length."""
    name = config['task']
    _, defaults, shortest = TASKS[name]
    for field in ('length', 'gates', 'digits', 'max_gap', 'placement'):
      if config[field] is not None and field not in defaults:
        expected = f'nothing: task {name} has only {", ".join(defaults)}'
        raise ConfigError(f'dataset.{field}', config[field], expected)
    if (config['length'] or shortest) < shortest:
      expected = f'at least {shortest} for task {name}'
      raise ConfigError('dataset.length', config['length'], expected)

  def __post_init__(self) -> None:
    kind, defaults, _ = TASKS[self.task]
    given = {name: getattr(self, name) for name in defaults}
    set_ = {name: value for name, value in given.items() if value is not None}
    self._task = kind(**defaults | set_)
    self.info = DatasetInfo(
      input_key='inputs',
      input_shape=self._task.input_shape,
      input_dtype='float32',
      num_classes=self._task.num_classes,
      class_names=(),
      num_examples=getattr(self, f'{self.split}_examples'),
    )

  @property
  def num_targets(self) -> int:
    """Targets at one step, G."""
    return self._task.num_targets

  def __len__(self) -> int:
    return self.info.num_examples

  def records(self, indices: Int[np.ndarray, ' B']) -> dict[str, np.ndarray]:
    """Returns the arrays of records; see the module."""
    key = self.data_seed, SPLITS.index(self.split), *self.task.encode()
    return self._task.records(record_bits(indices, self._task.num_draws, *key))

  def record(self, index: int) -> dict[str, Any]:
    """Returns the arrays of record `index`, without the batch axis."""
    return {k: v[0] for k, v in self.records(np.array([index])).items()}
