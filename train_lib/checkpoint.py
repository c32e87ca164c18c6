"""Checkpoints that survive crashes, full disks and flipped bits.

`Checkpointer` uses orbax for atomic, sharded, asynchronous writes and adds a
checksum manifest that is verified before reading, the fallback to the previous
good step, strict comparison of shapes and dtypes, retention of the newest and
the best, and errors that are raised at the next call instead of one save late.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from train_lib import checkpoint_io as io
from train_lib import strict_json
from train_lib.checkpoint_io import CheckpointError
from train_lib.run_directory import CHECKPOINTS

TEMPORARY = '.orbax-checkpoint-tmp'
SET_ASIDE = 'set_aside'


class Restored(NamedTuple):
  """The result of `Checkpointer.restore`.

  Attributes:
    state: with the structure that was asked for.
    extra: as it was given to `save`.
    step: of the checkpoint.
  """

  state: Any
  extra: dict[str, Any]
  step: int


class Checkpointer(contextlib.AbstractContextManager):
  """Saves and restores the state of one run; all processes call it alike.

  Args:
    directory: the folder of the checkpoints, one folder per step.
    keep: number of newest checkpoints to keep. A run survives a damaged newest
      checkpoint only with 2 or more.
    best_metric: a name in `metrics`; the checkpoint with its best value is
      kept too. Empty: none is.
    best_mode: 'max' or 'min'.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    keep: int = 2,
    best_metric: str = '',
    best_mode: str = 'max',
  ):
    self.directory = pathlib.Path(directory).absolute()
    self.directory.mkdir(parents=True, exist_ok=True)
    self._keep = keep
    self._best = {'metric': best_metric, 'mode': best_mode}
    self._description: dict[str, Any] = {}
    # The last step saved or restored, and the checkpoints of later steps.
    self._position: int | None = None
    self._later: list[int] = []
    self._orbax = ocp.AsyncCheckpointer(
      ocp.StandardCheckpointHandler(),
      async_options=ocp.options.AsyncOptions(
        # Called when all arrays are written, before the final rename.
        post_finalization_callback=self._finish,
        # A full disk then raises in the call that hits it.
        create_directories_asynchronously=False,
      ),
    )
    self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self._saving: concurrent.futures.Future[None] | None = None
    self._remove_temporary()

  def __exit__(self, *exception: object) -> None:
    self.close()

  def save(
    self,
    step: int,
    state: Any,
    extra: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
  ) -> None:
    """Starts saving; the state may be donated as soon as this returns.

    Checkpoints of later steps than the restored one are first moved to
    `set_aside/`.

    Args:
      step: of the state; it must grow from save to save.
      state: a pytree of arrays.
      extra: JSON values that `restore` returns.
      metrics: of this state; they decide which checkpoint is the best.

    Raises:
      CheckpointError: this or the previous save failed. Its temporary files
        are removed, older checkpoints are untouched. A run of one process may
        try again later, one of several has to be restarted.
    """
    self.wait()
    self._check_position(step)
    flat = io.flatten(state)
    self._description = {
      'step': step,
      'extra': dict(extra or {}),
      'metrics': dict(metrics or {}),
      'best': self._best,
      'arrays': io.layout(flat),
    }
    strict_json.dumps(self._description)  # an error here, not in a thread
    self._remove_temporary()
    self._set_aside_later()
    try:
      self._orbax.save(
        self.directory / str(step), args=ocp.args.StandardSave(io.nest(flat))
      )
    except Exception as error:
      raise self._failed(error) from error
    self._saving, self._position = self._thread.submit(self._complete), step

  def check(self) -> None:
    """Raises the error of a finished save; never waits for one.

    Call it in every step, so that a failed save is known one step later.
    """
    if self._saving is not None and self._saving.done():
      self.wait()

  def wait(self) -> None:
    """Waits for the running save.

    Raises:
      CheckpointError: if it failed; see `save`.
    """
    if self._saving is None:
      return
    try:
      self._saving.result()
    except Exception as error:
      raise self._failed(error) from error
    self._saving = None

  def restore(
    self, abstract_state: Any, step: int | None = None
  ) -> Restored | None:
    """Restores a step, or the newest one that is not damaged.

    Nothing is deleted, moved or cast; the number of devices may differ.

    Args:
      abstract_state: the wanted structure; leaves have shape, dtype and
        sharding. A leaf without sharding becomes a NumPy array.
      step: an exact step, which must then be good.

    Returns:
      The restored state; None if there is no checkpoint at all.

    Raises:
      CheckpointMismatchError: the checkpoint is of another structure.
      CorruptCheckpointError: the step, or every step, is damaged.
      CheckpointError: there is no such step.
    """
    self.wait()
    steps = io.steps_in(self.directory)
    if not steps and step is None:
      return None
    chosen = io.good_step(self.directory, step)
    path = self.directory / str(chosen)
    state = io.read_tree(path, abstract_state)
    extra = io.read_description(path)['extra']
    self._position = chosen
    self._later = [later for later in steps if later > chosen]
    return Restored(state, extra, chosen)

  def close(self) -> None:
    """Waits for the running save and ends all threads."""
    try:
      self.wait()
    finally:
      self._thread.shutdown()
      self._orbax.close()

  def _finish(self) -> None:
    name = f'{self._description["step"]}{TEMPORARY}'
    io.finish(self.directory / name, self._description)

  def _complete(self) -> None:
    """Waits until a checkpoint is complete, then removes superseded ones."""
    self._orbax.wait_until_finished()
    if jax.process_index() == 0:
      steps = io.steps_in(self.directory)
      best = io.best_step(self.directory, self._best)
      for step in set(steps[: -self._keep]) - {best}:
        # Renamed first: a kill must not leave half a checkpoint.
        path = self.directory / str(step)
        shutil.rmtree(path.rename(f'{path}{TEMPORARY}'), ignore_errors=True)

  def _failed(self, error: Exception) -> CheckpointError:
    self._saving = None
    self._remove_temporary()
    self._position = max(io.steps_in(self.directory), default=None)
    return CheckpointError(
      f'saving step {self._description["step"]} to {self.directory} failed: '
      f'{type(error).__name__}: {error}'
    )

  def _remove_temporary(self) -> None:
    """Removes the files of failed or killed saves; none may be running."""
    if jax.process_index() == 0:
      for path in self.directory.glob(f'*{TEMPORARY}*'):
        # A write that failed late may still add files; the next save removes
        # them.
        shutil.rmtree(path, ignore_errors=True)

  def _check_position(self, step: int) -> None:
    steps = io.steps_in(self.directory)
    if self._position is None and steps:
      raise CheckpointError(
        f'{self.directory} has checkpoints of steps {steps} that were not '
        'restored; restore one, or save to another directory'
      )
    if self._position is not None and step <= self._position:
      raise ValueError(
        f'step: expected more than {self._position}, the last one saved or '
        f'restored, got {step}'
      )

  def _set_aside_later(self) -> None:
    if jax.process_index() == 0:
      for step in self._later:
        _move_into(self.directory / str(step), self.directory / SET_ASIDE)
    self._later = []


def _move_into(path: pathlib.Path, folder: pathlib.Path) -> None:
  folder.mkdir(exist_ok=True)
  target, count = folder / path.name, 0
  while target.exists():
    count += 1
    target = folder / f'{path.name}.{count}'
  path.rename(target)


class RestoredParams(NamedTuple):
  """The result of `restore_params`; params and model_state are dictionaries."""

  params: Any
  model_state: Any
  step: int
  extra: dict[str, Any]

  @property
  def variables(self) -> dict[str, Any]:
    """The variables to evaluate."""
    return {'params': self.params, 'model_state': self.model_state}


def restore_params(
  directory: str | os.PathLike[str],
  step: int | str | None = None,
  average: bool = True,
  abstract_params: Any = None,
) -> RestoredParams:
  """Reads parameters and model state of a run, and not its optimizer.

  Args:
    directory: the run's workdir, or its folder of checkpoints.
    step: a step, 'best', or None for the newest that is not damaged.
    average: take the average of the parameters if the run kept one.
    abstract_params: the wanted parameters with shardings, or None.

  Raises:
    CheckpointError: there is no such checkpoint.
    CorruptCheckpointError: the step, or every step, is damaged.
    CheckpointMismatchError: the parameters are not the wanted ones.
  """
  path = _find_step(directory, step)
  description = io.read_description(path)
  names = description['arrays']
  has_average = any(name.startswith('ema_params/') for name in names)
  prefix = 'ema_params/' if average and has_average else 'params/'
  params = io.read_tree(path, abstract_params, prefix)
  model_state = io.read_tree(path, None, 'model_state/')
  extra = description['extra']
  return RestoredParams(params, model_state, int(path.name), extra)


def checkpoint_extra(
  directory: str | os.PathLike[str], step: int | str | None = None
) -> dict[str, Any]:
  """Reads the JSON values saved with a checkpoint; see `restore_params`."""
  return io.read_description(_find_step(directory, step))['extra']


def _find_step(
  directory: str | os.PathLike[str], step: int | str | None
) -> pathlib.Path:
  """Returns the folder of a good checkpoint; see `restore_params`."""
  root = pathlib.Path(directory).absolute()
  root = root / CHECKPOINTS if (root / CHECKPOINTS).is_dir() else root
  if step == 'best':
    step = io.best_step(root)
    if step is None:
      raise CheckpointError(
        f'{root} has no best checkpoint: no metric was recorded; set '
        'checkpoint.best_metric in the run, or give a step'
      )
  return root / str(io.good_step(root, step))
