"""Reads `spiece.model` without the library that wrote it.

The file is a protocol buffer message; the few fields that a unigram model needs
are taken from its wire format (protobuf.dev, "Encoding"). The classes that
sentencepiece generates for it work with one release of protobuf only.
"""

import dataclasses
import pathlib
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from dataset_lib.errors import InvalidDataError

NORMAL, UNKNOWN, CONTROL = 1, 2, 3  # types of pieces
_KINDS = {1: 'UNIGRAM', 2: 'BPE', 3: 'WORD', 4: 'CHAR'}
# Numbers of the fields, in sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK, _UNKNOWN_ID = 3, 35, 40
_CHARSMAP = 2
# Kinds of values on the wire.
_VARINT, _EIGHT_BYTES, _SIZED, _FOUR_BYTES = 0, 1, 2, 5


class Piece(NamedTuple):
  """One piece of the vocabulary.

  Attributes:
    text: its characters.
    score: logarithm of its probability.
    kind: NORMAL, UNKNOWN, CONTROL or another type.
  """

  text: str
  score: float
  kind: int


@dataclasses.dataclass(frozen=True)
class Model:
  """A unigram model.

  Attributes:
    pieces: by their ids.
    unknown_id: id of what the vocabulary does not have.
    charsmap: rules that normalise text, compiled.
  """

  pieces: tuple[Piece, ...]
  unknown_id: int
  charsmap: bytes


def read(path: pathlib.Path) -> Model:
  """Reads a model.

  Raises:
    InvalidDataError: the file is damaged, or another kind of model.
  """
  try:
    fields = list(_fields(path.read_bytes()))
    pieces = tuple(
      _piece(value) for number, value in fields if number == _PIECES
    )
    # They stand behind the pieces: a file that was cut short lacks them.
    trainer, normalizer = (
      dict(_fields(dict(fields)[number])) for number in (_TRAINER, _NORMALIZER)
    )
  except (
    AttributeError, LookupError, TypeError, ValueError, struct.error
  ) as error:  # fmt: skip
    raise InvalidDataError(f'{path} is damaged: {error!r}') from error
  kind = _KINDS.get(trainer.get(_MODEL_TYPE, 1), 'unknown')
  if kind != 'UNIGRAM' or not pieces:
    raise InvalidDataError(
      f'{path}: expected a SentencePiece model of type UNIGRAM, got {kind} '
      f'with {len(pieces)} pieces'
    )
  if trainer.get(_BYTE_FALLBACK):
    raise InvalidDataError(
      f'{path}: expected a SentencePiece model without byte_fallback'
    )
  return Model(
    pieces, trainer.get(_UNKNOWN_ID, 0), normalizer.get(_CHARSMAP, b'')
  )


def _piece(data: bytes) -> Piece:
  fields = dict(_fields(data))
  score = struct.unpack('<f', fields.get(_SCORE, bytes(4)))[0]
  return Piece(fields[_TEXT].decode('utf-8'), score, fields.get(_TYPE, NORMAL))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
  """Numbers and values of a message's fields, in their order."""
  place = 0
  while place < len(data):
    key, place = _varint(data, place)
    wire = key & 7
    if wire == _VARINT:
      value, place = _varint(data, place)
      yield key >> 3, value
      continue
    if wire == _SIZED:
      size, place = _varint(data, place)
    elif wire in (_EIGHT_BYTES, _FOUR_BYTES):
      size = 8 if wire == _EIGHT_BYTES else 4
    else:
      raise ValueError(f'no such kind of value: {wire}')
    if place + size > len(data):
      raise ValueError(f'it ends {place + size - len(data)} bytes too early')
    yield key >> 3, data[place : place + size]
    place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
  """A number in groups of seven bits, and the place behind it."""
  value = shift = 0
  while True:
    byte = data[place]
    value |= (byte & 0x7F) << shift
    place, shift = place + 1, shift + 7
    if byte < 0x80:
      return value, place
