"""The dense model and the student, run by PyTorch and ONNX Runtime.

Each has a process of its own, on the same weights and rows as ours. Rows in
batches are sorted by length first and padded to the longest of their batch:
what a careful user of those libraries does.
"""

import contextlib
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from launch import contest, export, peers
from launch.eat_report import rival_worker
from launch.eat_report.sweeps import Setting

TOLERANCE = 1e-3  # of the logits, to be the same model
TIMEOUT = 1800.0  # seconds


class Rival(NamedTuple):
  """A model of ours in a process of somebody else's library.

  Attributes:
    name: e.g. 'PyTorch dense'.
    setting: ours, with the same weights.
    alone: seconds of the row at a place, on its own.
    together: seconds of all rows in full batches.
    differing: rows with another answer than ours.
    is_alive: whether its process lives; the seconds of a dead one are NaN.
  """

  name: str
  setting: Setting
  alone: Callable[[int], float]
  together: Callable[[], float]
  differing: int
  is_alive: Callable[[], bool]


@contextlib.contextmanager
def start(
  names: Sequence[str],
  settings: Mapping[str, Setting],
  rows: np.ndarray,
  batch_size: int,
  report: Callable[[str], None],
) -> Iterator[list[Rival]]:
  """The rivals, alive within the context; who cannot take part is reported.

  Args:
    names: of `peers.PACKAGES`.
    settings: of dense models, by the name of their run.
    rows: places in the split of the rows that are timed.
    batch_size: rows of a full batch.
    report: gets a line about everybody who is left out or computes something
      else.
  """
  able = []
  for name in names:
    reason = peers.missing(name)
    if reason:
      report(f'left out: {peers.TITLES[name]}: {reason}')
    else:
      able.append(name)
  with tempfile.TemporaryDirectory(prefix='eat_rivals_') as folder:
    directory = pathlib.Path(folder)
    with contest.Contest(directory, TIMEOUT, report) as processes:
      found = []
      for run, setting in settings.items() if able else ():
        weights = str(directory / run)
        model = setting.model
        export.save(weights, model.module, model.run.variables['params'])
        items = str(directory / f'{run}.npz')
        records = [setting.model.run.records.record(int(r)) for r in rows]
        rival_worker.write_rows(items, records)
        for name in able:
          title = f'{peers.TITLES[name]} {run}'
          question = dict(
            peer=name, weights=weights, rows=items, batch_size=batch_size
          )
          answer = processes.start(
            title,
            [sys.executable, '-m', 'launch.eat_report.rival_worker'],
            question,
            {'HF_HUB_OFFLINE': '1'},
          )
          if answer is not None:
            logits = np.array(answer['logits'], np.float32)
            differing = _differing(title, setting.chosen[rows], logits, report)
            found.append(_rival(title, setting, processes, differing))
      yield found


def _rival(
  title: str, setting: Setting, processes: contest.Contest, differing: int
) -> Rival:
  def seconds(case: str) -> float:
    answer = processes.ask(title, {'case': case, 'calls': 1})
    return float('nan') if answer is None else answer['seconds']

  return Rival(
    title,
    setting,
    lambda place: seconds(str(place)),
    lambda: seconds('all'),
    differing,
    lambda: title in processes.workers,
  )


def _differing(
  title: str,
  ours: np.ndarray,
  theirs: np.ndarray,
  report: Callable[[str], None],
) -> int:
  difference = float(np.abs(ours - theirs).max())
  if not difference <= TOLERANCE:
    report(
      f'WARNING: {title} has our weights, but its logits are {difference:.2g} '
      f'from ours; expected at most {TOLERANCE:g}'
    )
  if ours.shape[1] == 1:
    return int((np.abs(ours - theirs) > TOLERANCE).sum())
  return int((ours.argmax(1) != theirs.argmax(1)).sum())
