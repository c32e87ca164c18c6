"""Stops a run on SIGTERM or Ctrl-C, after saving the current step."""

import contextlib
import os
import signal
import threading
from types import FrameType

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preempted(Exception):  # noqa: N818 - an event, not an error
  """The run was stopped and has saved `step`; the same command resumes."""

  def __init__(self, step: int):
    super().__init__(
      f'stopped by a signal; step {step} is saved, the same command goes on '
      'from there'
    )
    self.step = step


class PreemptionGuard(contextlib.ExitStack):
  """A context in which the first SIGTERM or SIGINT sets `should_stop`.

  With `jax.distributed` initialised, JAX's coordination service handles
  SIGTERM and agrees on one step for all processes; SIGINT is forwarded to it.
  Enter the context after `jax.distributed.initialize`.
  """

  def __enter__(self) -> 'PreemptionGuard':
    self._requested = False
    self._distributed = jax.distributed.is_initialized()
    # Python lets only the main thread set handlers.
    if threading.current_thread() is threading.main_thread():
      for number in SIGNALS[1:] if self._distributed else SIGNALS:
        before = signal.signal(number, self._handle)
        self.callback(signal.signal, number, before)
    return self

  def should_stop(self, step: int) -> bool:
    """Returns True to save `step` and stop; equal in all processes."""
    if self._distributed:
      return multihost_utils.reached_preemption_sync_point(step)
    return self._requested

  def _handle(self, number: int, frame: FrameType | None) -> None:
    self._requested = True
    self.close()  # a second signal has its default effect
    if self._distributed:
      os.kill(os.getpid(), signal.SIGTERM)
