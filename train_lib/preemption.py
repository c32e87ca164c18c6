"""Being asked to stop: finish the step, save, leave with an own exit code.

A scheduler sends SIGTERM before it takes the machine, a person presses
Ctrl-C. Neither may lose the steps since the last checkpoint, and a second
signal must still end a process that hangs.
"""

import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

PREEMPTED = 75  # EX_TEMPFAIL: try again, the same command goes on
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preempted(Exception):  # noqa: N818 - an event, not an error
  """The run was asked to stop and has saved `step`; exit with `PREEMPTED`."""

  def __init__(self, step: int):
    super().__init__(
      f'stopped by a signal; step {step} is saved, the same command goes on '
      'from there'
    )
    self.step = step


class PreemptionGuard:
  """Turns the first SIGTERM or SIGINT into a question the loop asks.

  With `jax.distributed` initialised, SIGTERM belongs to JAX's coordination
  service, which agrees on one step for all processes; SIGINT is passed on to
  it. Enter the context after `jax.distributed.initialize`.
  """

  def __init__(self):
    self._requested = False
    self._previous: dict[signal.Signals, Any] = {}
    self._distributed = jax.distributed.is_initialized()

  def __enter__(self) -> 'PreemptionGuard':
    signals = (signal.SIGINT,) if self._distributed else SIGNALS
    # Python lets only the main thread set handlers.
    if threading.current_thread() is threading.main_thread():
      self._previous = {
        number: signal.signal(number, self._handle) for number in signals
      }
    return self

  def __exit__(self, *exception: object) -> None:
    self._restore()

  def should_stop(self, step: int) -> bool:
    """Whether to save `step` and stop; ask in every step.

    With several processes the answer is the same in all of them.
    """
    if self._distributed:
      return multihost_utils.reached_preemption_sync_point(step)
    return self._requested

  def _handle(self, number: int, frame: FrameType | None) -> None:
    del frame
    self._requested = True
    self._restore()  # the second signal acts as if we were not here
    if self._distributed:
      os.kill(os.getpid(), signal.SIGTERM)

  def _restore(self) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)
    self._previous = {}
