"""Checkpoints that survive crashes, full disks and flipped bits.

orbax writes atomically, sharded and in the background; this adds checksums, a
fallback, retention, and errors at the next call.
"""

import concurrent.futures
import contextlib
import errno
import math
import os
import pathlib
import shutil
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from core import files
from train_lib import checkpoint_io as io
from train_lib.checkpoint_io import CheckpointError
from train_lib.run_directory import Path, steps_in


class Checkpointer(contextlib.ExitStack):
  """Saves and restores the state of one run; all processes call it alike.

  It keeps the `keep` newest checkpoints, and the best if `best_metric` is not
  empty. A run survives a damaged newest checkpoint only with 2 or more.
  """

  def __init__(
    self, directory: Path, keep: int = 2, best_metric='', best_mode='max'
  ):
    super().__init__()
    self.directory = pathlib.Path(directory).absolute()
    self.directory.mkdir(parents=True, exist_ok=True)
    self._keep = keep
    self._best = {'metric': best_metric, 'mode': best_mode}
    self._description: dict[str, Any] = {}
    # The restored step; later checkpoints belong to an abandoned continuation.
    self._restored = math.inf
    self._orbax = io.Writer(self._finish)
    self.callback(self._close)
    self._thread = self.enter_context(concurrent.futures.ThreadPoolExecutor(1))
    self._saving: concurrent.futures.Future[None] | None = None
    self.failures = 0  # of saves in a row
    self.callback(self.wait)
    self._remove_temporary()

  def save(
    self,
    step: int,
    state: Any,
    extra: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
  ) -> None:
    """Starts saving; the state may be donated as soon as this returns.

    `extra` are JSON values; steps must grow. Checkpoints of later steps than
    the restored one are first moved to `set_aside/`. Raises CheckpointError if
    this or the previous save failed; older checkpoints are untouched, and a run
    of one process may try again.
    """
    self.wait()
    flat = io.flatten(state)
    self._description = dict(
      step=step, extra=dict(extra or {}), metrics=dict(metrics or {}),
      best=self._best, arrays=io.layout(flat),
    )  # fmt: skip
    files.dumps(self._description)  # raises now if not JSON
    self._remove_temporary()
    self._set_later_aside()
    with self._errors():
      need = sum(array.nbytes for array in flat.values())
      free = shutil.disk_usage(self.directory).free
      # Before many writes fail. Of several processes all save, or none.
      if free < need and jax.process_count() == 1:
        full = os.strerror(errno.ENOSPC)
        raise OSError(f'{full}: {need} bytes needed, {free} free')
      self._orbax.write(self.directory / str(step), flat)
    self._saving = self._thread.submit(self._complete)

  def wait(self, block: bool = True) -> None:
    """Raises CheckpointError of the last save; waits for its end if `block`."""
    saving = self._saving
    if saving is not None and (block or saving.done()):
      self._saving = None
      with self._errors():
        saving.result()
        self.failures = 0

  def amend(
    self, step: int, extra: Mapping[str, Any], metrics: Mapping[str, float]
  ) -> None:
    """Replaces `extra` and `metrics` of the newest checkpoint, once saved."""
    before, path = self._saving, self.directory / str(step)

    def run() -> None:
      if before is not None:
        before.result()
      if jax.process_index() == 0:
        io.amend(path, extra=extra, metrics=metrics)
        self._remove_old()

    self._saving = self._thread.submit(run)

  def restore(self, abstract_state: Any) -> tuple[Any, io.Saved] | None:
    """Returns (state, checkpoint) of the newest undamaged, None without any.

    Nothing is deleted, moved or cast; the number of devices may differ.
    """
    self.wait()
    if not steps_in(self.directory):
      return None
    saved = io.find(self.directory)
    state = saved.read(abstract=abstract_state)
    self._restored = saved.step
    return state, saved

  def _close(self) -> None:
    with self._errors():
      self._orbax.close()

  def _finish(self) -> None:
    name = f'{self._description["step"]}{io.TEMPORARY}'
    io.finish(self.directory / name, self._description)

  def _complete(self) -> None:
    """Waits for the save, then deletes older ones not covered by `keep`."""
    self._orbax.wait_until_finished()
    if jax.process_index() == 0:
      self._remove_old()

  def _remove_old(self) -> None:
    best = io.best_step(self.directory)
    for step in {*steps_in(self.directory)[: -self._keep]} - {best}:
      # Renamed first, so a killed process leaves no partial checkpoint here.
      path = self.directory / str(step)
      shutil.rmtree(path.rename(f'{path}{io.TEMPORARY}'), ignore_errors=True)

  @contextlib.contextmanager
  def _errors(self) -> Iterator[None]:
    try:
      yield
    except Exception as error:
      self.failures += 1
      self._remove_temporary()
      step = self._description.get('step')
      saved = '' if step is None else f' step {step}'
      cause = f'{type(error).__name__}: {error}'
      message = f'saving{saved} to {self.directory} failed: {cause}'
      raise CheckpointError(message) from error

  def _remove_temporary(self) -> None:
    """Removes the files of failed or killed saves; none may be running."""
    if jax.process_index() == 0:
      for path in self.directory.glob(f'*{io.TEMPORARY}*'):
        # Files written later by a failed save are removed at the next save.
        shutil.rmtree(path, ignore_errors=True)

  def _set_later_aside(self) -> None:
    folder = self.directory / 'set_aside'
    for step in steps_in(self.directory):
      if step > self._restored and jax.process_index() == 0:
        folder.mkdir(exist_ok=True)
        path = self.directory / str(step)
        path.rename(folder / f'{step}.{time.time_ns()}')
    self._restored = math.inf
