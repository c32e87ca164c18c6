"""Rows between two stages: on the device, compacted, waiting for company.

For every key there is at most one open batch of the full size. Rows that go
on are copied into its next free slots, once. Filled up, it *is* the next
batch and runs without another copy; run early, its first rows are cut off as
a smaller batch. Slots without a row of their own hold a copy of some slot, so
padding is never anything a real row could not be.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int

from serve_lib.buckets import Grid, Key
from serve_lib.chain import Row
from serve_lib.programs import Programs
from serve_lib.schedule import Waiting


@dataclasses.dataclass
class Batch:
  """Rows that are, or will be, run together.

  Attributes:
    key: the stage they wait for, its variant and length.
    size: the batch bucket.
    rows: the rows, without padding.
    slots: where each of them is in the batch.
    carry: device arrays, rows first; None before stage 0.
  """

  key: Key
  size: int
  rows: list[Row]
  slots: Int[np.ndarray, ' b']
  carry: Any = None


@dataclasses.dataclass
class _Place:
  """The open batch of a key: its rows are in the first slots."""

  carry: Any
  rows: list[Row]


class Pool:
  """The open batches of all keys. One thread owns it.

  Attributes:
    peak_bytes: the most device memory that the open batches ever had.
  """

  def __init__(self, programs: Programs, grid: Grid):
    self._programs = programs
    self._grid = grid
    self._places: dict[Key, _Place] = {}
    self.peak_bytes = 0

  @property
  def rows(self) -> int:
    """Rows in the pool."""
    return sum(len(place.rows) for place in list(self._places.values()))

  @property
  def bytes(self) -> int:
    """Device memory of the open batches, free slots included."""
    return sum(self.open_bytes(key) for key in list(self._places))

  def open_bytes(self, key: Key) -> int:
    """Device memory of one open batch; 0 after the last stage."""
    return self._grid.capacity * self._programs.row_bytes.get(key, 0)

  def next_bytes(self, key: Key) -> int:
    """Device memory of the batches that the rows of a batch may open."""
    return sum(map(self.open_bytes, self._programs.next_keys(key)))

  @property
  def widest_bytes(self) -> int:
    """Device memory of the largest open batch there can be."""
    keys = self._programs.row_bytes
    before = {key._replace(stage=key.stage - 1) for key in keys}
    return max(map(self.next_bytes, before), default=0)

  def waiting(self) -> list[Waiting]:
    """The open batches, for `schedule.choose`."""
    return [
      Waiting(key, len(place.rows), place.rows[0].since)
      for key, place in self._places.items()
    ]

  def has(self, key: Key) -> bool:
    """Whether rows wait under this key."""
    return key in self._places

  def add(self, batch: Batch) -> Batch | None:
    """Moves the rows of a batch into the pool.

    Returns:
      A full batch if one has come about: it is out of the pool.
    """
    key, capacity = batch.key, self._grid.capacity
    place = self._places.get(key)
    if place is None:
      self._places[key] = place = self._open(batch, 0)
      rest = None
    else:
      room = capacity - len(place.rows)
      place.carry = self._join(batch, place, room)
      # The rest first: should it fail, no row is out of reach of `discard`.
      rest = self._open(batch, room) if len(batch.rows) > room else None
      place.rows = place.rows + batch.rows[:room]
    self.peak_bytes = max(self.peak_bytes, self.bytes)
    if len(place.rows) < capacity:
      return None
    del self._places[key]
    if rest is not None:
      self._places[key] = rest
    return self._whole(key, place)

  def take(self, key: Key) -> Batch:
    """Takes what waits under a key, as the smallest batch that holds it."""
    place = self._places[key]
    batch = self._whole(key, place)
    size = self._grid.fit_rows(len(place.rows))
    if size < batch.size:
      batch.carry = self._programs.cut(key, size, place.carry)
      batch.size = size
    del self._places[key]
    return batch

  def discard(self, key: Key) -> list[Row]:
    """Drops what waits under a key; returns its rows."""
    place = self._places.pop(key, None)
    return [] if place is None else place.rows

  def clear(self) -> list[Row]:
    """Drops everything; returns the rows."""
    return [row for key in list(self._places) for row in self.discard(key)]

  def _open(self, batch: Batch, first: int) -> _Place:
    """A new place with the rows of the batch from number `first` on."""
    slots = batch.slots[first:]
    # Free places hold a row that is done, if there is one: a chain may stop
    # early when nothing is left to do.
    done = np.setdiff1d(np.arange(batch.size), batch.slots)
    filler = done[0] if len(done) else slots[0]
    source = np.full(self._grid.capacity, filler, np.int32)
    source[: len(slots)] = slots
    carry = self._programs.open(batch.key, batch.size, batch.carry, source)
    return _Place(carry, batch.rows[first:])

  def _join(self, batch: Batch, place: _Place, room: int) -> Any:
    """The place's carry with up to `room` rows of the batch added."""
    slots = batch.slots[:room]
    places = np.full(batch.size, self._grid.capacity, np.int32)
    start = len(place.rows)
    places[slots] = np.arange(start, start + len(slots))
    return self._programs.join(
      batch.key, batch.size, place.carry, batch.carry, places
    )

  def _whole(self, key: Key, place: _Place) -> Batch:
    slots = np.arange(len(place.rows), dtype=np.int32)
    return Batch(key, self._grid.capacity, place.rows, slots, place.carry)
