"""Where metrics go while a run is on: the terminal and TensorBoard.

Writers have clu's interface (`write_scalars`, `flush`, `close`), but are built
on `rich` and on tensorboard's own writer: importing clu's package imports
TensorFlow, and a parity run must not pay for that.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import rich.console
import rich.progress


class Writer(Protocol):
  """clu's `MetricWriter`, as far as it is used here."""

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    """Writes the values of one step."""

  def flush(self) -> None:
    """Makes sure that what was written can be read."""

  def close(self) -> None:
    """Flushes and releases files."""


class TensorBoardWriter:
  """Event files in a directory, without TensorFlow."""

  def __init__(self, directory: str):
    from tensorboard import summary

    self._writer = summary.Writer(directory)

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    """One point per name."""
    for name, value in scalars.items():
      self._writer.add_scalar(name, value, step)

  def flush(self) -> None:
    """Flushes the event file."""
    self._writer.flush()

  def close(self) -> None:
    """Closes the event file."""
    self._writer.close()


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
      'eta_seconds': (self._total - step) / max(overall, 1e-9),
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


def headline(
  metrics: Mapping[str, float], speed: Mapping[str, float], waiting: float
) -> dict[str, float]:
  """The few values worth a line in the terminal."""
  chosen = ('loss', 'accuracy', 'tape_length_mean', 'ponder_steps_mean')
  line = {name: metrics[name] for name in chosen if name in metrics}
  line['steps/s'] = speed['steps_per_second']
  line['examples/s'] = speed['examples_per_second']
  line['waiting for data'] = waiting
  line['ETA'] = speed['eta_seconds']
  return line


def _short(name: str, value: float) -> str:
  if name == 'ETA':
    return f'{int(value // 60)}:{int(value % 60):02d}'
  if name == 'waiting for data':
    return f'{100 * value:.1f} %'
  return f'{value:.4g}'


def close_all(writers: Sequence[Writer]) -> None:
  """Closes every writer."""
  for writer in writers:
    writer.close()
