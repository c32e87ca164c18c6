"""The process of a rival; see `launch.eat_report.rivals`."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from launch import contest, peers
from serve_lib.process import keep_freed_memory


def write_rows(path: str, records: Sequence[Mapping[str, Any]]) -> None:
  """Token ids and types of ragged rows, one after the other."""
  np.savez(
    path,
    length=np.array([len(one['tokens']) for one in records]),
    tokens=np.concatenate([one['tokens'] for one in records]),
    token_types=np.concatenate([one['token_types'] for one in records]),
  )


def batches(
  path: str, batch_size: int
) -> list[tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
  """Batches of rows of similar length: their places, and padded arrays.

  Args:
    path: what `write_rows` wrote.
    batch_size: rows of a batch; the last may have less.
  """
  file = np.load(path)
  length, ends = file['length'], np.cumsum(file['length'])
  order = np.argsort(length, kind='stable')
  result = []
  for start in range(0, len(order), batch_size):
    places = order[start : start + batch_size]
    shape = len(places), int(length[places].max())
    padded = [np.zeros(shape, np.int64) for _ in range(3)]
    for row, place in enumerate(places.tolist()):
      own = slice(ends[place] - length[place], ends[place])
      padded[0][row, : length[place]] = file['tokens'][own]
      padded[1][row, : length[place]] = file['token_types'][own]
      padded[2][row, : length[place]] = 1
    result.append((places, (padded[0], padded[1], padded[2])))
  return result


def build(
  question: dict[str, Any],
) -> tuple[dict[str, Any], Mapping[str, Callable[[], int]]]:
  """The first answer and the cases; see `contest.serve`.

  A case is the place of a row that is classified alone, or 'all'.
  """
  keep_freed_memory()
  started = time.perf_counter()
  peer = peers.load(question['peer'], question['weights'])
  single = sorted(batches(question['rows'], 1), key=lambda one: int(one[0][0]))
  full = batches(question['rows'], question['batch_size'])

  def run_all() -> int:
    return sum(len(peer.classify(*arrays)) for _, arrays in full)

  def alone(arrays: Any) -> Callable[[], int]:
    return lambda: len(peer.classify(*arrays))

  cases = {str(int(places[0])): alone(arrays) for places, arrays in single}
  logits = [peer.classify(*arrays)[0].tolist() for _, arrays in single]
  answer = dict(
    logits=logits,
    device=peer.device,
    versions=dict(peer.versions),
    prepare_seconds=time.perf_counter() - started,
  )
  return answer, cases | {'all': run_all}


if __name__ == '__main__':
  contest.serve(build)
