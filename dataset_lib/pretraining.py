"""Pretraining as ALBERT's: masked n-grams, and the order of two segments.

Reads what `launch.prepare_corpus` wrote. A record is a row of consecutive
sentences of one document, see `corpus_packing`. Each time it is read it is

- shortened, with probability `short_share`, to about a random length;
- split in two segments at a random sentence border (at a word where there is
  none), which are swapped with probability 0.5 (label 1): the sentence-order
  prediction of Lan et al. (2020), section 3.1;
- framed as [CLS] a [SEP] b [SEP] and padded;
- masked, see `masking`.

All of this is a function of (seed, epoch, index) and computed for many rows at
once. One ordered pass is epoch 0.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from dataset_lib import (
  corpus,
  fields,
  masking,
  pretraining_rows,
  source,
  tokenizer,
)
from dataset_lib.errors import ConfigError, InvalidDataError
from dataset_lib.pretraining_rows import Table, uniform
from dataset_lib.source import DatasetInfo

CLASS_NAMES = ('in_order', 'swapped')

FIELDS = {
  'directory': fields.text('a directory that launch.prepare_corpus wrote'),
  'max_length': fields.integer(8, 65536, default=128),
  'mask_share': fields.real(0.01, 0.9, default=0.2),
  'max_ngram': fields.integer(1, 16, default=3),
  'short_share': fields.real(0.0, 1.0, default=0.1),
}


class PretrainingSource:
  """Rows of one split of a prepared corpus; a `DrawnSource`.

  Args:
    directory: the prepared corpus.
    split: 'train' or 'validation'.
    config: the fields of `FIELDS`.

  Raises:
    ConfigError: the rows were cut for another `max_length`.
    MissingDataError: there is no such corpus, or no such split.
    InvalidDataError: it is damaged.
  """

  def __init__(
    self, directory: pathlib.Path, split: str, config: Mapping[str, Any]
  ):
    manifest = corpus.read_manifest(directory)
    length = config['max_length']
    if length != manifest['max_length']:
      raise ConfigError(
        'dataset.max_length',
        length,
        f'{manifest["max_length"]}, for which {directory} was prepared; '
        f'launch.prepare_corpus --max_length={length} makes another',
      )
    given = tokenizer.load(directory / corpus.TOKENIZER_FILE)
    self._split = corpus.open_split(directory, manifest, split)
    self._name = f'{directory}, split {split}'
    self._config = dict(config)
    self._slots = masking.slots(length, config['mask_share'])
    self._table, self._vocabulary = _tables(given, manifest['vocab_size'])
    rows = len(self._split.rows) - 1
    if rows > source.MAX_EXAMPLES:
      raise InvalidDataError(
        f'{self._name}: expected at most {source.MAX_EXAMPLES} rows, got '
        f'{rows}; prepare it in parts, or with a larger --max_length'
      )
    self.info = DatasetInfo(
      input_key='tokens',
      input_shape=(length,),
      input_dtype='int32',
      num_classes=len(CLASS_NAMES),
      class_names=CLASS_NAMES,
      num_examples=rows,
      vocab_size=given.vocab_size,
    )

  def __len__(self) -> int:
    return self.info.num_examples

  def draw(
    self,
    seed: int,
    epochs: Int[np.ndarray, ' B'],
    indices: Int[np.ndarray, ' B'],
  ) -> dict[str, np.ndarray]:
    """Rows as they are in the given epochs.

    Args:
      seed: the run's seed.
      epochs: of each row.
      indices: which rows.

    Returns:
      {'tokens', 'token_types': int32 [B, L], masked and padded; 'length',
      'label': int32 [B], the tokens of each row and 1 where its segments are
      swapped; and the 'mlm_...' arrays of `masking.mask`, [B, P] with P =
      ceil(mask_share * max_length)}.
    """
    length, slots = self.info.input_shape[0], self._slots
    keys = pretraining_rows.row_keys(seed, epochs, indices)
    segments = pretraining_rows.segments(
      self._split,
      indices,
      length - corpus.SPECIAL_IN_ROW,
      self._config['short_share'],
      self._table,
      uniform(keys, 0, pretraining_rows.DRAWS),
    )
    rows = pretraining_rows.framed(segments, length, self._table)
    start = pretraining_rows.DRAWS
    draws = masking.Draws(
      lengths=uniform(keys, start, length),
      order=uniform(keys, start + length, length),
      kinds=uniform(keys, start + 2 * length, slots),
      replacements=uniform(keys, start + 2 * length + slots, slots),
    )
    masked = masking.mask(
      rows.text,
      masking.budget(rows.lengths, self._config['mask_share']),
      self._config['max_ngram'],
      self._vocabulary,
      draws,
    )
    return {
      **masked,
      'token_types': rows.token_types,
      'length': rows.lengths,
      'label': segments.swapped.astype(np.int32),
    }

  def record(self, index: int) -> dict[str, Any]:
    """The tokens of a row as the document has them, int32 [M], and label 0."""
    start, stop = self._split.rows[index : index + 2]
    return {
      'tokens': self._split.tokens[start:stop].astype(np.int32),
      'label': 0,
    }

  def where(self, index: int) -> str:
    """The document of a row, counted from 0."""
    document = np.searchsorted(self._split.documents, index, 'right') - 1
    return f'{self._name}, document {document}'


def _tables(
  given: tokenizer.Tokenizer, vocab_size: int
) -> tuple[Table, masking.Vocabulary]:
  if given.vocab_size != vocab_size or given.mask_id is None:
    raise InvalidDataError(
      f'{corpus.TOKENIZER_FILE} of the prepared corpus: expected {vocab_size} '
      f'tokens and [MASK], got {given.vocab_size} tokens; prepare it again'
    )
  table = Table(given.pad_id, given.cls_id, given.sep_id, given.word_starts())
  ordinary = np.setdiff1d(np.arange(vocab_size), given.special_ids)
  return table, masking.Vocabulary(given.mask_id, ordinary.astype(np.int32))


def check_split(split: str) -> None:
  """Raises ConfigError unless the split is 'train' or 'validation'."""
  fields.check_one_of('split', split, corpus.SPLITS)


def build(config: Mapping[str, Any], split: str) -> PretrainingSource:
  """The source of one split; `config` has every field of FIELDS."""
  directory = pathlib.Path(config['directory']).expanduser()
  return PretrainingSource(directory, split, config)
