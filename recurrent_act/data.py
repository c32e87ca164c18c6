"""Synthetic sequences of Graves (2016), and one with inputs to skip.

The tasks of "Adaptive Computation Time for Recurrent Neural Networks"
(arXiv:1603.08983), padded to the longest of the task. A batch holds

  inputs       float32 [B, T, E]
  valid        float32 [B, T], 1 for an input, 0 for padding
  targets      int32 [B, T, G], classes of the G targets of a step
  target_mask  float32 [B, T], 1 for a step with targets

and of sparse_parity `marked` float32 [B, T]. A record is a function of
(data_seed, split, index) and of the fields of the task.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Interval
from jaxtyping import Bool, Float, Int, UInt64

from core.errors import ConfigError
from dataset_lib.order import integers, record_bits
from dataset_lib.source import Batched, DatasetInfo, Seed, Size, TrainTest

NUM_DIGITS = 10
BLANK = 10  # class of the places after the last digit of a sum
SPLITS = ('train', 'test')

# draw(count) -> `count` random numbers per record; called once per batch.
Draw = Callable[[int], UInt64[np.ndarray, 'B N']]

# Table 1 of the paper: values for (P, Q) = TT, TF, FT, FF of nor, xq, abj, xor,
# nand, and, xnor, if/then, then/if, or; as GATES[gate, p, q].
GATES = np.array([
  *((0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0), (0, 1, 1, 0), (0, 1, 1, 1)),
  *((1, 0, 0, 0), (1, 0, 0, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)),
])[:, ::-1].reshape(-1, 2, 2)  # fmt: skip


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


def parity(draw: Draw, length: int, placement: str) -> dict[str, np.ndarray]:
  """Section 3.1: one vector, of which 1 to `length` numbers are 1 or -1.

  The target is 1 if the number of 1s is odd. 'scattered' sets any numbers, the
  paper's "randomly", 'leading' the first, as the code of Fojo's thesis does.
  """
  bits = draw(1 + 2 * length)
  count = integers(bits[:, :1], 1, length)
  order, signs = bits[:, 1 : length + 1], bits[:, length + 1 :]
  if placement == 'scattered':
    # The places of the `count` smallest random numbers: a random subset.
    last = np.take_along_axis(np.sort(order, axis=1), count - 1, axis=1)
    is_set = order <= last
  else:
    is_set = leading(count[:, 0], length)
  numbers = np.where(is_set, 2 * integers(signs, 0, 1) - 1, 0)
  odd = np.count_nonzero(numbers == 1, axis=1) % 2
  everywhere = np.ones((len(bits), 1), bool)
  return arrays(numbers[:, None], everywhere, odd[:, None, None], everywhere)


def logic(draw: Draw, length: int, gates: int) -> dict[str, np.ndarray]:
  """Section 3.2: chains of binary gates, each vector on the last one's result.

  A vector has the bits b0 and b1, one-hot indices into `GATES` of 1 to `gates`
  gates, and zeros. Its target is b_{B+1}, where b_{i+1} = T_i(b_i, b_{i-1})
  (21). From the second vector on b0 is the previous target; the input shows 0.
  """
  # The number of vectors and b0; of each vector b1, B and its gates.
  bits = draw(2 + length * (2 + gates))
  valid = leading(integers(bits[:, 0], 1, length), length)
  drawn = bits[:, 2:].reshape(len(bits), length, 2 + gates)
  used = leading(integers(drawn[..., 1], 1, gates), gates)
  chosen = integers(drawn[..., 2:], 0, len(GATES) - 1)
  before, second = integers(bits[:, 1], 0, 1), integers(drawn[..., 0], 0, 1)
  one_hot = np.eye(len(GATES))[chosen] * used[..., None]
  inputs = np.zeros((*second.shape, 2 + gates * len(GATES)))
  inputs[:, 0, 0] = before
  inputs[:, :, 1] = second
  inputs[:, :, 2:] = one_hot.reshape(*second.shape, gates * len(GATES))
  targets = np.zeros((*second.shape, 1), np.int64)
  for t in range(length):
    b0, b1 = before, second[:, t]
    for i in range(gates):  # b_{i+1} = T_i(b_i, b_{i-1})
      result, is_gate = GATES[chosen[:, t, i], b1, b0], used[:, t, i]
      b0, b1 = np.where(is_gate, b1, b0), np.where(is_gate, result, b1)
    targets[:, t, 0] = before = b1
  return arrays(inputs, valid, targets, valid)


def addition(draw: Draw, length: int, digits: int) -> dict[str, np.ndarray]:
  """Section 3.3: the running sum of numbers of 1 to `digits` decimal digits.

  A number is a one-hot vector per digit, the most significant first, then
  zeros; it may begin with 0s. The target is the sum so far, digit by digit,
  then the class `BLANK`. The first number has none.
  """
  bits = draw(1 + length * (1 + digits))
  valid = leading(integers(bits[:, 0], 1, length), length)
  drawn = bits[:, 1:].reshape(len(bits), length, 1 + digits)
  used = leading(integers(drawn[..., 0], 1, digits), digits)
  chosen = integers(drawn[..., 1:], 0, NUM_DIGITS - 1)
  numbers = np.zeros(valid.shape, np.int64)
  for place in range(digits):
    longer = 10 * numbers + chosen[..., place]
    numbers = np.where(used[..., place], longer, numbers)
  one_hot = np.eye(NUM_DIGITS)[chosen] * used[..., None]
  places = len(str(length * (10**digits - 1)))
  return arrays(
    one_hot.reshape(*valid.shape, digits * NUM_DIGITS),
    valid,
    decimal_places(np.cumsum(numbers, axis=1), places),
    valid & (np.arange(length)[None] > 0),
  )


def sort(draw: Draw, length: int) -> dict[str, np.ndarray]:
  """Section 3.4: the order of 2 to `length` standard normal numbers.

  `count` inputs hold a number and a flag, 1 at the last number. Then come
  `count` zero inputs; their targets are the places of the ascending numbers.
  """
  bits = draw(1 + 2 * length)
  count = integers(bits[:, :1], 2, length)
  numbers = normals(bits[:, 1 : length + 1], bits[:, length + 1 :])
  # Rounded as the network sees them, so that the target is their order.
  numbers = numbers.astype(np.float32)
  places = np.arange(2 * length)[None]
  shown, asked = places < count, (places >= count) & (places < 2 * count)
  inputs = np.zeros((*shown.shape, 2), np.float32)
  inputs[:, :length, 0] = np.where(shown[:, :length], numbers, 0)
  inputs[:, :, 1] = places == count - 1
  # What is not shown sorts to the end.
  unused_last = np.where(shown[:, :length], numbers, np.inf)
  order = np.argsort(unused_last, axis=1, kind='stable')
  targets = np.take_along_axis(
    order, np.clip(places - count, 0, length - 1), axis=1
  )
  return arrays(inputs, shown | asked, targets[..., None], asked)


def sparse_parity(
  draw: Draw, length: int, max_gap: int
) -> dict[str, np.ndarray]:
  """The parity of few marked bits; each announces how far off the next one is.

  A task for Skip-ACT, which chooses skips from earlier inputs only. An input is
  (bit, mark, one-hot number of unmarked inputs that follow: 0 to `max_gap`).
  Bits are 1 or -1, noise if unmarked. The target at every input is 1 if an odd
  number of marked bits so far were 1.
  """
  bits = draw(2 * length)
  gaps = integers(bits[:, :length], 0, max_gap)
  ones = integers(bits[:, length:], 0, 1)
  # gaps[:, i] unmarked inputs follow marked input i.
  starts = np.cumsum(gaps + 1, axis=1) - gaps - 1
  marked = np.zeros(ones.shape, bool)
  row, number = np.nonzero(starts < length)
  marked[row, starts[row, number]] = True
  inputs = np.zeros((*ones.shape, 2 + max_gap + 1))
  inputs[..., 0] = 2 * ones - 1
  inputs[..., 1] = marked
  inputs[row, starts[row, number], 2 + gaps[row, number]] = 1
  targets = np.cumsum(ones * marked, axis=1) % 2
  everywhere = np.ones(ones.shape, bool)
  batch = arrays(inputs, everywhere, targets[..., None], everywhere)
  return batch | {'marked': marked.astype(np.float32)}


def decimal_places(numbers: np.ndarray, places: int) -> np.ndarray:
  """Returns digits, the most significant first, then `BLANK`s."""
  powers, place = 10 ** np.arange(places), np.arange(places)
  numbers = numbers[..., None]
  # Digits of each number; 0 has one.
  count = np.maximum((numbers >= powers).sum(-1, keepdims=True), 1)
  shifted = numbers // 10 ** np.maximum(count - 1 - place, 0)
  return np.where(place < count, shifted % 10, BLANK)


# The records of each task, their fields with the paper's values, and the least
# value of `length`.
TASKS: dict[str, tuple[Callable[..., Any], dict[str, Any], int]] = {
  'parity': (parity, {'length': 64, 'placement': 'scattered'}, 1),
  'logic': (logic, {'length': 10, 'gates': 10}, 1),
  'addition': (addition, {'length': 5, 'digits': 5}, 1),
  'sort': (sort, {'length': 15}, 2),
  'sparse_parity': (sparse_parity, {'length': 20, 'max_gap': 3}, 1),
}


@dataclasses.dataclass(kw_only=True, eq=False)
class Graves(Batched):
  """Sequences of one task and split, computed on demand.

  Fields of the task that are not given have the paper's values. Runs with
  different seeds share one test set, selected by `data_seed`.
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
    _, fields, _ = TASKS[self.task]
    values = {name: getattr(self, name) for name in fields}
    self._fields = fields | {k: v for k, v in values.items() if v is not None}
    classes = {'addition': BLANK + 1, 'sort': self._fields['length']}
    example = self.record(0)
    self.info = DatasetInfo(
      input_key='inputs',
      input_shape=example['inputs'].shape,
      input_dtype='float32',
      num_classes=classes.get(self.task, 2),
      class_names=(),
      num_examples=getattr(self, f'{self.split}_examples'),
    )

  def records(self, indices: Int[np.ndarray, ' B']) -> dict[str, np.ndarray]:
    """Returns the arrays of records; see the module."""
    key = self.data_seed, SPLITS.index(self.split), *self.task.encode()
    return TASKS[self.task][0](
      lambda count: record_bits(indices, count, *key), **self._fields
    )
