"""Headers of images: their pixels, and the work of decoding them."""

import io
import math
import re
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import PIL.Image
from PIL.JpegImagePlugin import JpegImageFile

from core.errors import BadRecord

Picture = PIL.Image.Image

PIL.Image.MAX_IMAGE_PIXELS = None  # only reads headers here; `image_ops` checks
JPEG_START, _JPEG_END, _JPEG_SCAN = b'\xff\xd8', b'\xd9', b'\xda'
SCANS = 16  # of a JPEG that count as one; a progressive CMYK has 18
# Others are slow, or have sizes that Pillow does not see.
_FORMATS = 'PNG', 'WEBP', 'BMP', 'GIF'
_PNG_START, _PNG_PACKED = b'\x89PNG\r\n\x1a\n', (b'iCCP', b'zTXt', b'iTXt')
MAX_PACKED = 64  # chunks of a PNG that Pillow and OpenCV decompress
PNG_UNCHECKED = 2**20  # bytes of pixels, which unpack to 1 GiB at most
# Of a JPEG; in pixels 0 and the numbers of restarts may follow 255.
_MARKER = re.compile(rb'\xff+([^\x00\xff\xd0-\xd7])')


def count_pixels(data: bytes) -> int:
  """Returns the pixels that are decoded of an image; BadRecord as `header`."""
  return scanned_pixels(header(data), count_scans(data))


def scanned_pixels(picture: Picture, scans: int) -> int:
  """Returns the pixels of an image, times the scans over `SCANS`."""
  return math.prod(picture.size) * max(scans // SCANS, 1)


def count_scans(data: bytes) -> int:
  """Returns the scans of a JPEG, 0 of others; BadRecord if its end is cut."""
  place, scans = len(JPEG_START), 0
  if not data.startswith(JPEG_START):
    return 0
  while match := _MARKER.search(data, place):
    if match[1] == _JPEG_END:
      return scans
    scans += match[1] == _JPEG_SCAN
    # A segment, such as a thumbnail with an end of its own, is not searched.
    end = match.end()
    place = end + int.from_bytes(data[end : end + 2], 'big')
  raise BadRecord('truncated', '', f'JPEG ends at {len(data)} bytes')


def header(data: bytes) -> Picture:
  """Opens an image without its pixels; raises BadRecord if that fails."""
  file = io.BytesIO(data)
  try:
    if data.startswith(JPEG_START):
      return JpegImageFile(file)
    if data.startswith(_PNG_START):
      _check_chunks(data)
    return PIL.Image.open(file, formats=_FORMATS)
  except Exception as error:  # Pillow raises nothing narrower
    message = f'no image Pillow can read, begins {data[:8]!r}'
    raise BadRecord('undecodable', '', message) from error


def _check_chunks(data: bytes) -> None:
  """Raises ValueError where a PNG unpacks to much more than its pixels."""
  view, place, packed, parts = memoryview(data), len(_PNG_START), 0, []
  while place + 8 <= len(data):
    size, kind = struct.unpack_from('>I4s', data, place)
    packed += kind in _PNG_PACKED
    if kind == b'IDAT':
      parts.append(view[place + 8 : place + 8 + size])
    place += 12 + size
  most = 2**20 + 9 * math.prod(struct.unpack('>2I', data[16:24]))
  pixels = sum(map(len, parts))
  if pixels > PNG_UNCHECKED:
    pixels = _unpacked(parts, most)
  if packed > MAX_PACKED or pixels > most:
    raise ValueError('a PNG with more than its pixels')


def _unpacked(parts: Sequence[memoryview], most: int) -> int:
  """Returns the bytes that parts unpack to, or more than `most`."""
  packer, total = zlib.decompressobj(), 0
  for part in parts:
    for start in range(0, len(part), 2**16):
      piece: Any = part[start : start + 2**16]
      while piece and total <= most and not packer.eof:
        total += len(packer.decompress(piece, 2**20))
        piece = packer.unconsumed_tail
  return total
