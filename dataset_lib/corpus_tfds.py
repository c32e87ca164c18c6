"""Texts that TFDS prepared (wikipedia, pg19) as a stream of paragraphs.

A record is a document. Read without TensorFlow, one record after the other.
"""

import io
import os
from collections.abc import Callable, Iterator
from typing import Any

from dataset_lib import corpus_files, tfds_source
from dataset_lib.corpus_faults import Faults
from dataset_lib.corpus_files import END, Paragraph
from dataset_lib.errors import BadRecord, InvalidDataError, MissingDataError

PREFIX = 'tfds:'
TEXT = 'text'


class TfdsTexts:
  """The texts of one split of a prepared builder.

  Attributes:
    size: bytes on disk.

  Args:
    name: of the builder, like 'wikipedia/20230601.en'.
    data_dir: of TFDS, '' for its default; or a folder of one prepared version.
    split: name or part of a split.

  Raises:
    MissingDataError: it is not prepared, or has no such split.
    InvalidDataError: it has no feature 'text', and not one that ends so.
  """

  def __init__(self, name: str, data_dir: str, split: str = 'train'):
    try:
      import tensorflow_datasets as tfds
    except ImportError as error:
      raise MissingDataError(
        f'{PREFIX}{name} needs tensorflow-datasets: pip install '
        "'adaptive-computation[tfds]'"
      ) from error
    builder = tfds_source.prepared_builder(name, data_dir)
    self._key = text_key(builder)
    # Only this one is parsed, whatever else the records hold.
    self._features = tfds.features.FeaturesDict(
      {self._key: builder.info.features[self._key]}
    )
    instructions = tfds_source.file_instructions(builder, split)
    self._records = tfds_source.open_records(builder, instructions)
    self._count = sum(part.take for part in instructions)
    files = {part.filename for part in instructions}
    self.size = sum(map(os.path.getsize, files))

  def __len__(self) -> int:
    return self._count

  def paragraphs(
    self,
    faults: Faults,
    advance: Callable[[int], None],
    max_line: int = corpus_files.MAX_LINE,
    wrapped: bool = False,
  ) -> Iterator[Paragraph]:
    """As `corpus_files.paragraphs`; an empty line does not end a record.

    Args:
      faults: counts what is repaired and left out.
      advance: called with bytes on disk that are done, as many a record.
      max_line: longest line, in bytes.
      wrapped: lines are broken to a width.
    """
    for number in range(self._count):
      where = self._records.where(number)
      advance(self.size // self._count)
      try:
        stream = io.BytesIO(self._text(number))
      except BadRecord as bad:
        faults.add('unreadable_record', where, f'{bad.kind}: {bad.message}')
        continue
      lines = corpus_files.clean(
        corpus_files.pieces(stream, max_line), where, faults
      )
      if wrapped:
        yield from corpus_files.joined(lines, max_line)
      else:
        yield from (line for line in lines if line.text)
      yield END

  def _text(self, number: int) -> bytes:
    from google.protobuf import message

    data = self._records[number]
    try:
      return self._features.deserialize_example_np(data)[self._key]
    except (message.DecodeError, KeyError, ValueError) as error:
      raise BadRecord('unparsable', '', str(error)) from error


def text_key(builder: Any) -> str:
  """The feature that holds the text: 'text', or like pg19's 'book_text'."""
  features = list(builder.info.features)
  if TEXT in features:
    return TEXT
  ending = [key for key in features if key.endswith(TEXT)]
  if len(ending) != 1:
    raise InvalidDataError(
      f'{builder.info.full_name}: expected a feature {TEXT!r}, got '
      f'{", ".join(features)}'
    )
  return ending[0]
