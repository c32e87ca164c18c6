"""The four synthetic tasks of Graves (2016), and one with inputs to skip.

Each task turns random bits, `num_draws` uint64 of them per record, into
sequences of real vectors with targets; see `dataset_lib.graves` for where the
bits come from and for the arrays. Section numbers are those of "Adaptive
Computation Time for Recurrent Neural Networks" (arXiv:1603.08983).
"""

from typing import Any

import numpy as np
from jaxtyping import Bool, Int, UInt64

from dataset_lib.graves_draws import arrays, integers, leading, normals

NUM_DIGITS = 10
BLANK = 10  # class of a place behind the last digit of a sum

# Table 1 of the paper: truth values of (P, Q) = TT, TF, FT, FF.
TRUTH_TABLES = {
  'nor': (0, 0, 0, 1),
  'xq': (0, 0, 1, 0),
  'abj': (0, 1, 0, 0),
  'xor': (0, 1, 1, 0),
  'nand': (0, 1, 1, 1),
  'and': (1, 0, 0, 0),
  'xnor': (1, 0, 0, 1),
  'if_then': (1, 0, 1, 1),
  'then_if': (1, 1, 0, 1),
  'or': (1, 1, 1, 0),
}
# GATES[gate, p, q]; the table's first column is p = q = 1.
GATES = np.array(list(TRUTH_TABLES.values()))[:, ::-1].reshape(-1, 2, 2)


class Parity:
  """Section 3.1: one vector, of which some numbers are 1 or -1 and the rest 0.

  The target is 1 if the number of 1s is odd. How many numbers are set is
  uniform over 1 .. `length`.

  Args:
    length: numbers in the vector, 64 in the paper.
    placement: 'scattered' sets numbers anywhere in the vector, as the paper's
      "randomly"; 'leading' sets the first ones, as the code of Fojo's thesis
      does, which is easier to learn.
  """

  num_classes, num_targets = 2, 1

  def __init__(self, length: int, placement: str):
    self.input_shape = (1, length)
    self.num_draws = 1 + 2 * length
    self._scattered = placement == 'scattered'

  def records(self, bits: UInt64[np.ndarray, 'B N']) -> dict[str, np.ndarray]:
    """See `SyntheticTask`."""
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


class Logic:
  """Section 3.2: chains of binary gates, each vector on the last one's result.

  A vector begins with the bits b0 and b1, then come one-hot indices into
  `TRUTH_TABLES`, of 1 to `gates` gates, and zeros. Its target is b_{B+1},
  where b_{i+1} = T_i(b_i, b_{i-1}) (equation 21). From the second vector on b0
  is the target before, and 0 in the input.

  Args:
    length: most vectors in a sequence, 10 in the paper; at least 1.
    gates: most gates in a vector, 10 in the paper.
  """

  num_classes, num_targets = 2, 1

  def __init__(self, length: int, gates: int):
    self._gates = gates
    self.input_shape = (length, 2 + gates * len(GATES))
    # The number of vectors and b0; of each vector b1, B and its gates.
    self.num_draws = 2 + length * (2 + gates)

  def records(self, bits: UInt64[np.ndarray, 'B N']) -> dict[str, np.ndarray]:
    """See `SyntheticTask`."""
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
      before = _chain(before, second[:, t], gates[:, t], used[:, t])
      targets[:, t, 0] = before
    return arrays(inputs, valid, targets, valid)


class Addition:
  """Section 3.3: the running sum of numbers of 1 to `digits` decimal digits.

  A number is a one-hot vector per digit, the most significant first, and zeros
  behind the last one; it may begin with 0s. The target is the sum so far,
  digit by digit likewise, with the class `BLANK` behind the last one. The
  first number has none.

  Args:
    length: most numbers in a sequence, 5 in the paper; at least 1, and of a
      single number nothing is asked.
    digits: most digits of a number, 5 in the paper.
  """

  num_classes = NUM_DIGITS + 1

  def __init__(self, length: int, digits: int):
    self._digits = digits
    self.input_shape = (length, digits * NUM_DIGITS)
    self.num_targets = len(str(length * (10**digits - 1)))
    self.num_draws = 1 + length * (1 + digits)

  def records(self, bits: UInt64[np.ndarray, 'B N']) -> dict[str, np.ndarray]:
    """See `SyntheticTask`."""
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


class Sort:
  """Section 3.4: the order of 2 to `length` standard normal numbers.

  An input is a number and a flag, which is 1 at the last number. As many
  inputs of zeros follow, whose targets are the places (from 0) of the numbers
  in ascending order.

  Args:
    length: most numbers in a sequence, 15 in the paper; at least 2.
  """

  num_targets = 1

  def __init__(self, length: int):
    self._length = length
    self.input_shape = (2 * length, 2)
    self.num_classes = length
    self.num_draws = 1 + 2 * length

  def records(self, bits: UInt64[np.ndarray, 'B N']) -> dict[str, np.ndarray]:
    """See `SyntheticTask`."""
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


class SparseParity:
  """The parity of few marked bits; how far off the next one is, is announced.

  Not of Graves (2016): a task for Skip-ACT, which decides whether it reads an
  input before it has seen it, so that what may be skipped must be foretold. An
  input is (bit, mark, one-hot number of unmarked inputs that follow). Bits are
  1 or -1; those of unmarked inputs mean nothing, and nothing is announced
  there. The target at every input is 1 if an odd number of marked bits so far
  were 1. The first input is marked; after each marked one come 0 to `max_gap`
  unmarked ones, uniformly. Batches also hold `marked` float32 [B, T].

  Args:
    length: inputs in a sequence.
    max_gap: most unmarked inputs in a row; at least 1.
  """

  num_classes, num_targets = 2, 1

  def __init__(self, length: int, max_gap: int):
    self._max_gap = max_gap
    self.input_shape = (length, 2 + max_gap + 1)
    self.num_draws = 2 * length

  def records(self, bits: UInt64[np.ndarray, 'B N']) -> dict[str, np.ndarray]:
    """See `SyntheticTask`."""
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


def decimal_places(
  numbers: Int[np.ndarray, '*S'], places: int
) -> Int[np.ndarray, '*S P']:
  """Digits, the most significant first, then `BLANK` up to `places` of them."""
  digits = [np.ones_like(numbers)]
  for place in range(1, places):
    digits.append(digits[-1] + (numbers >= 10**place))
  count = digits[-1]  # digits of each number; 0 has one
  result = np.full((*numbers.shape, places), BLANK)
  for place in range(places):
    power = 10 ** np.maximum(count - 1 - place, 0)
    result[..., place] = np.where(place < count, numbers // power % 10, BLANK)
  return result


def _chain(
  b0: Int[np.ndarray, ' B'],
  b1: Int[np.ndarray, ' B'],
  gates: Int[np.ndarray, 'B M'],
  used: Bool[np.ndarray, 'B M'],
) -> Int[np.ndarray, ' B']:
  """`b_{B+1}` of equation (21)."""
  for i in range(gates.shape[1]):
    result = GATES[gates[:, i], b1, b0]
    b0 = np.where(used[:, i], b1, b0)
    b1 = np.where(used[:, i], result, b1)
  return b1


TASKS: dict[str, Any] = {
  'parity': Parity,
  'logic': Logic,
  'addition': Addition,
  'sort': Sort,
  'sparse_parity': SparseParity,
}
