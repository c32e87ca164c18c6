"""Parity: is the number of 1s in a sequence of symbols even or odd?

AdaTape, section 3.2. Symbols are drawn uniformly from {1, -1, 0}. They travel
as token ids: id 0 is the symbol 1, id 1 is -1, id 2 is 0. The label is the
number of 1s modulo 2. A record is a pure function of (data_seed, split, index),
so the train stream needs no storage and is as long as `train_examples` says.
Train and test draw from separate streams; short sequences recur by chance, as
there are only 3 ** length of them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int, UInt64

from dataset_lib import fields, source

SYMBOLS = (1, -1, 0)  # SYMBOLS[token id] is the symbol
ONE = SYMBOLS.index(1)
SPLITS = ('train', 'test')

FIELDS = {
  'length': fields.integer(1, 65536),
  'data_seed': fields.integer(0, source.MAX_SEED, default=0),
  'train_examples': fields.integer(1, source.MAX_EXAMPLES, default=2**20),
  'test_examples': fields.integer(1, source.MAX_EXAMPLES, default=4096),
}

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def splitmix64(
  counters: UInt64[np.ndarray, '...'],
) -> UInt64[np.ndarray, '...']:
  """Random bits of each counter (Steele, Lea and Flood, 2014, figure 16).

  A counter-based generator gives record i without drawing the records before
  it and works on whole arrays; the wrap-around of uint64 is intended.
  """
  bits = counters * _INCREMENT
  bits = (bits ^ (bits >> np.uint64(30))) * _MULTIPLIER_1
  bits = (bits ^ (bits >> np.uint64(27))) * _MULTIPLIER_2
  return bits ^ (bits >> np.uint64(31))


class ParitySource:
  """Parity sequences of one split.

  Args:
    length: symbols in a sequence.
    data_seed: selects the streams; independent of the run's seed, so that runs
      with different seeds share one test set.
    split: 'train' or 'test'.
    num_examples: records in the split.
  """

  def __init__(
    self, length: int, data_seed: int, split: str, num_examples: int
  ):
    self.info = source.DatasetInfo(
      input_key='tokens',
      input_shape=(length,),
      input_dtype='int32',
      num_classes=2,
      class_names=('even', 'odd'),
      num_examples=num_examples,
      vocab_size=len(SYMBOLS),
    )
    self._split = split
    seeds = np.random.SeedSequence([data_seed, SPLITS.index(split)])
    self._first_counter = seeds.generate_state(1, np.uint64)[0]

  def __len__(self) -> int:
    return self.info.num_examples

  def records(self, indices: Int[np.ndarray, ' B']) -> dict[str, np.ndarray]:
    """Tokens int32 [B, length] and labels int32 [B] of the given records."""
    length = np.uint64(self.info.input_shape[0])
    starts = self._first_counter + indices.astype(np.uint64) * length
    bits = splitmix64(starts[:, None] + np.arange(length, dtype=np.uint64))
    # The upper 32 bits times 3 / 2**32 are uniform over {0, 1, 2} to 2**-32.
    tokens = ((bits >> np.uint64(32)) * np.uint64(3)) >> np.uint64(32)
    tokens = tokens.astype(np.int32)
    labels = np.count_nonzero(tokens == ONE, axis=1) % 2
    return {'tokens': tokens, 'label': labels.astype(np.int32)}

  def record(self, index: int) -> dict[str, Any]:
    """Tokens int32 [length] and label of record `index`."""
    batch = self.records(np.array([index]))
    return {'tokens': batch['tokens'][0], 'label': int(batch['label'][0])}

  def where(self, index: int) -> str:
    """Generated records lie in no file; the name of the stream stands in."""
    return f'parity/{self._split}'


def check_split(split: str) -> None:
  """Raises ConfigError unless the split is 'train' or 'test'."""
  fields.check_one_of('split', split, SPLITS)


def build(config: Mapping[str, Any], split: str) -> ParitySource:
  """The source of one split; `config` has every field of FIELDS."""
  return ParitySource(
    length=config['length'],
    data_seed=config['data_seed'],
    split=split,
    num_examples=config[f'{split}_examples'],
  )
