"""What can be read off a JPEG's markers without decoding it (ITU-T T.81).

Two facts that OpenCV does not give: the size before decoding, which decides
at what scale to decode, and whether the file ends early, which OpenCV before
version 5 hides by filling the rest with grey.
"""

import struct

_START, _END = b'\xff\xd8', b'\xff\xd9'
_SCAN = b'\xff\xda'
_EXIF_MARKER = 0xE1
# SOF0-SOF15 without DHT (C4), JPG (C8) and DAC (CC): they hold the size.
_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ORIENTATION_TAG = 0x0112
_SWAPPING_ORIENTATIONS = (5, 6, 7, 8)


def is_truncated(data: bytes) -> bool:
  """Whether `data` is a JPEG without an end after its last scan.

  Trailing bytes after the end are legal, and an embedded thumbnail has an end
  of its own, so the last end has to come after the last start of a scan.
  """
  if not data.startswith(_START) or data.endswith(_END):
    return False
  return data.rfind(_END) <= data.rfind(_SCAN)


def upright_size(data: bytes) -> tuple[int, int] | None:
  """(height, width) after EXIF rotation; None where the header is unclear."""
  if not data.startswith(_START):
    return None
  try:
    return _walk_segments(data)
  except (struct.error, IndexError):
    return None


def _walk_segments(data: bytes) -> tuple[int, int] | None:
  offset, swapped = 2, False
  while True:
    prefix, marker, length = struct.unpack_from('>BBH', data, offset)
    if prefix != 0xFF or length < 2:
      return None
    if marker in _FRAME_MARKERS:
      height, width = struct.unpack_from('>HH', data, offset + 5)
      if not height or not width:
        return None
      return (width, height) if swapped else (height, width)
    if marker == _EXIF_MARKER:
      segment = data[offset + 4 : offset + 2 + length]
      if segment.startswith(b'Exif\0\0'):
        swapped = _orientation(segment[6:]) in _SWAPPING_ORIENTATIONS
    offset += 2 + length


def _orientation(tiff: bytes) -> int:
  """The orientation tag of a TIFF header, 1 where there is none."""
  order = {b'II': '<', b'MM': '>'}.get(tiff[:2], '>')
  (directory,) = struct.unpack_from(order + 'I', tiff, 4)
  (count,) = struct.unpack_from(order + 'H', tiff, directory)
  for entry in range(count):
    start = directory + 2 + 12 * entry
    (tag,) = struct.unpack_from(order + 'H', tiff, start)
    if tag == _ORIENTATION_TAG:
      return struct.unpack_from(order + 'H', tiff, start + 8)[0]
  return 1
