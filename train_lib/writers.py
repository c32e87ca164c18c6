"""Where metrics go while a run is on: the terminal and TensorBoard.

`TensorBoardWriter` has the interface of clu's metric writers (`write_scalars`,
`close`; every write is flushed) but writes with tensorboard alone: importing
clu's package imports TensorFlow, and a parity run must not pay for that.
"""

import datetime
import math
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import rich.console
import rich.progress


class TensorBoardWriter:
  """One event file in a directory, without TensorFlow.

  tensorboard's public `summary.Writer` imports TensorFlow wherever it is
  installed; its record writer and messages do not.
  """

  def __init__(self, directory: str):
    from tensorboard.summary.writer.record_writer import RecordWriter

    path = pathlib.Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    name = f'events.out.tfevents.{time.time():.6f}.{os.getpid()}'
    self._records = RecordWriter((path / name).open('wb'))
    self._write(file_version='brain.Event:2')

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    """One point per name."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [
      Summary.Value(tag=name, simple_value=value)
      for name, value in scalars.items()
    ]
    self._write(step=step, summary=Summary(value=values))

  def _write(self, **fields: Any) -> None:
    from tensorboard.compat.proto.event_pb2 import Event

    event = Event(wall_time=time.time(), **fields)
    self._records.write(event.SerializeToString())
    self._records.flush()

  def close(self) -> None:
    """Closes the event file."""
    self._records.close()


class Progress:
  """What a person sees: a bar with speed and ETA, and a line per log step.

  In a terminal the bar stays at the bottom; in a file or a pipe only the
  lines appear, each with the speed and the ETA.
  """

  def __init__(self, total_steps: int, start_step: int, batch_size: int):
    self.console = rich.console.Console(highlight=False, soft_wrap=True)
    self._total, self._batch_size = total_steps, batch_size
    self._started, self._start_step = time.monotonic(), start_step
    self._last = (self._started, start_step)
    self._compiled = False
    self._bar: Any = None
    if self.console.is_terminal:
      self._bar = rich.progress.Progress(
        '[progress.description]{task.description}',
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
        console=self.console,
      )
      self._task = self._bar.add_task(
        'training', total=total_steps, completed=start_step
      )
      self._bar.start()

  def advance(self, step: int) -> None:
    """Moves the bar; `step` is the number of steps done."""
    if not self._compiled:
      # Speed and ETA leave the compilation of the first step out.
      self._compiled = True
      self._started, self._start_step = time.monotonic(), step
      self._last = (self._started, step)
    if self._bar is not None:
      self._bar.update(self._task, completed=step)

  def speed(self, step: int) -> dict[str, float]:
    """Steps/s and examples/s since the last call, ETA in seconds."""
    now = time.monotonic()
    then, previous = self._last
    self._last = (now, step)
    rate = (step - previous) / max(now - then, 1e-9)
    overall = (step - self._start_step) / max(now - self._started, 1e-9)
    return {
      'steps_per_second': rate,
      'examples_per_second': rate * self._batch_size,
      'eta_seconds': (self._total - step) / overall if overall else math.nan,
    }

  def line(self, step: int, scalars: Mapping[str, float]) -> None:
    """Prints the values of one step on one line."""
    width = len(str(self._total))
    text = '  '.join(f'{k} {_short(k, v)}' for k, v in scalars.items())
    self.console.print(f'step {step:{width}d}/{self._total}  {text}')

  def close(self) -> None:
    """Removes the bar."""
    if self._bar is not None:
      self._bar.stop()


HEADLINE = (
  'loss', 'accuracy', 'mlm_accuracy', 'sop_accuracy', 'tape_length_mean',
  'ponder_steps_mean', 'iterations', 'depth', 'steps',
)  # fmt: skip


def headline(
  metrics: Mapping[str, float], speed: Mapping[str, float], waiting: float
) -> dict[str, float]:
  """The few values worth a line in the terminal."""
  line = {name: metrics[name] for name in HEADLINE if name in metrics}
  line['steps/s'] = speed['steps_per_second']
  line['examples/s'] = speed['examples_per_second']
  line['waiting for data'] = waiting
  line['ETA'] = speed['eta_seconds']
  return line


def _short(name: str, value: float) -> str:
  if name == 'ETA':
    # Unknown until a step was timed.
    return '-' if math.isnan(value) else str(datetime.timedelta(0, int(value)))
  if name == 'waiting for data':
    return f'{100 * value:.1f} %'
  return f'{value:.4g}'
