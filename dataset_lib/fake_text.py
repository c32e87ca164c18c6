"""Fake rows of token ids for tests, used only where asked for by name.

Rows have all lengths up to `max_length`, short ones more often. A share of the
tokens comes from a part of the vocabulary that belongs to the class (or whose
size is the score, for a regression), so a model can learn them. There is no
text behind them and no tokenizer. Ids 0, 1 and 2 stand for [PAD], [CLS] and
[SEP]; the second half of a row is its second segment.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dataset_lib import fields, source, text_rows
from dataset_lib.source import DatasetInfo, Encoded, TokenSource

SPLITS = ('train', 'test')
PAD, CLS, SEP = 0, 1, 2
FIRST_TOKEN = 3
MIN_LENGTH = 4
SIGNAL = 0.5  # share of the tokens that tell the class

FIELDS = {
  **text_rows.LENGTH_FIELDS,
  'vocab_size': fields.integer(32, 2**24, default=128),
  # 1 for a regression: the label is then a score in [0, 5].
  'num_classes': fields.integer(1, 16, default=2),
  'train_examples': fields.integer(1, 2**22, default=4096),
  'test_examples': fields.integer(1, 2**22, default=512),
}


def check_split(split: str) -> None:
  """Raises ConfigError unless the split is 'train' or 'test'."""
  fields.check_one_of('split', split, SPLITS)


def build(config: Mapping[str, Any], split: str) -> TokenSource:
  """The source of one split; `config` has every field of FIELDS."""
  rng = np.random.default_rng([SPLITS.index(split)])
  size, classes = config[f'{split}_examples'], config['num_classes']
  max_length = config['max_length']
  # The square of a uniform number: short rows are more frequent.
  spread = rng.random(size) ** 2 * (max_length - MIN_LENGTH + 1)
  lengths = MIN_LENGTH + spread.astype(np.int64)
  if classes == 1:
    labels = rng.uniform(0.0, 5.0, size).astype(np.float32)
  else:
    labels = rng.integers(classes, size=size).astype(np.int32)
  info = DatasetInfo(
    input_key='tokens',
    input_shape=(max_length,),
    input_dtype='int32',
    num_classes=classes,
    class_names=tuple(f'fake_{label}' for label in range(classes))
    if classes > 1
    else (),
    num_examples=size,
    vocab_size=config['vocab_size'],
    label_dtype='float32' if classes == 1 else 'int32',
    length_buckets=source.length_buckets(config['length_buckets'], max_length),
  )
  encoded = _encoded(rng, lengths, labels, config['vocab_size'], classes)
  return TokenSource(
    info, encoded, labels, PAD, lambda index: f'fake_text/{split}'
  )


def _encoded(rng, lengths, labels, vocab_size: int, classes: int) -> Encoded:
  offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
  count, words = int(offsets[-1]), vocab_size - FIRST_TOKEN
  tokens = rng.integers(words, size=count)
  signal = rng.random(count) < SIGNAL
  if classes == 1:
    # The higher the score, the more tokens are of the upper half.
    upper = rng.random(count) < np.repeat(labels / 5.0, lengths)
    wanted = tokens // 2 + np.where(upper, words // 2, 0)
  else:
    part = words // classes
    wanted = tokens % part + np.repeat(labels, lengths) * part
  tokens = np.where(signal, wanted, tokens) + FIRST_TOKEN
  tokens[offsets[:-1]] = CLS
  tokens[offsets[1:] - 1] = SEP
  place = np.arange(count) - np.repeat(offsets[:-1], lengths)
  types = place >= np.repeat(lengths, lengths) // 2
  return Encoded(tokens.astype(np.int32), types.astype(np.int32), offsets)
