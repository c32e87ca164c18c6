"""Checkpoints that survive crashes, full disks and flipped bits.

`Checkpointer` is a thin layer over orbax's asynchronous `CheckpointManager`.
orbax gives atomic, sharded, asynchronous writes; added here are a checksum
manifest that is verified before reading, the fall back to the previous good
step, strict comparison of shapes and dtypes, retention of newest and best,
and errors that come at the next call instead of one save late.
"""

import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import (
  AnyPreservationPolicy,
  LatestN,
)

from train_lib import checkpoint_format as form
from train_lib import checkpoint_reader as reader
from train_lib import strict_json
from train_lib.checkpoint_format import (
  CheckpointError,
  CheckpointMismatchError,
  CheckpointWarning,
  CorruptCheckpointError,
)
from train_lib.checkpoint_reader import RestoredParams, restore_params

__all__ = [
  'CheckpointError',
  'CheckpointMismatchError',
  'CheckpointWarning',
  'Checkpointer',
  'CorruptCheckpointError',
  'Restored',
  'RestoredParams',
  'restore_params',
]

TEMPORARY = '.orbax-checkpoint-tmp'
SET_ASIDE = 'set_aside'


class Restored(NamedTuple):
  """What `Checkpointer.restore` found.

  Attributes:
    state: with the structure that was asked for.
    extra: as it was given to `save`.
    step: of the checkpoint.
    damaged: a line for each damaged file of newer, passed over checkpoints.
  """

  state: Any
  extra: dict[str, Any]
  step: int
  damaged: tuple[str, ...]


class Checkpointer:
  """Saves and restores the state of one run; all processes call it alike.

  Args:
    directory: of the checkpoints, one folder per step.
    keep: how many of the newest to keep. A damaged newest checkpoint can
      only be survived with 2 or more.
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
    if keep < 1 or best_mode not in reader.MODES:
      raise ValueError(
        f'expected keep >= 1 and best_mode in {list(reader.MODES)}, got '
        f'keep={keep} and best_mode={best_mode!r}'
      )
    self.directory = pathlib.Path(directory).absolute()
    self._keep = keep
    self._best = {'metric': best_metric, 'mode': best_mode}
    self._metrics: dict[int, Mapping[str, float]] = {}
    self._description: dict[str, Any] = {}
    # The step this run is known to stand on, and what lies beyond it.
    self._position: int | None = None
    self._later: list[int] = []
    self._saving = False
    self._manager = self._open()

  def __enter__(self) -> 'Checkpointer':
    return self

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

    Checkpoints of later steps than the one that was restored (damaged ones,
    or all after a return to an earlier step) are moved to `set_aside/`
    first: they are not of this run's past, and would be in its way.

    Args:
      step: of the state; it must grow from save to save.
      state: a pytree of arrays.
      extra: JSON values to come back from `restore`.
      metrics: of this state; they decide which checkpoint is the best.

    Raises:
      CheckpointError: this or the save before failed. Nothing temporary is
        left and older checkpoints are untouched. A run of one process may
        try again later, one of several has to be restarted.
    """
    self.wait()
    self._check_position(step)
    flat = form.flatten(state)
    self._description = {
      'step': step,
      'extra': dict(extra or {}),
      'metrics': dict(metrics or {}),
      'best': self._best,
      'arrays': form.layout(flat),
    }
    strict_json.dumps(self._description)  # an error here, not in a thread
    self._remove_temporary()
    self._set_aside_later()
    self._metrics[step] = self._description['metrics']
    try:
      self._manager.save(
        step, args=ocp.args.StandardSave(form.nest(flat)), force=True
      )
    except Exception as error:
      raise self._failed(error) from error
    self._saving, self._position = True, step

  def check(self) -> None:
    """Raises what a finished save left as an error; never waits for one.

    Call it in every step, so that a failed save is known one step later.
    """
    if self._saving and not self._manager.is_saving_in_progress():
      self.wait()

  def wait(self) -> None:
    """Waits for the save under way.

    Raises:
      CheckpointError: if it failed; see `save`.
    """
    try:
      self._manager.wait_until_finished()
    except Exception as error:
      raise self._failed(error) from error
    self._saving = False

  def restore(self, abstract_state: Any, step: int | None = None) -> (
    Restored | None
  ):  # fmt: skip
    """Restores a step, or the newest one that is not damaged.

    Nothing is deleted, moved or cast. The number of devices may differ from
    the one at saving.

    Args:
      abstract_state: the wanted structure; leaves have shape, dtype and
        sharding. A leaf without sharding comes back as a NumPy array.
      step: an exact step, which must then be good.

    Returns:
      What was restored; None if there is no checkpoint at all.

    Raises:
      CheckpointMismatchError: the checkpoint is of another structure.
      CorruptCheckpointError: the step, or every step, is damaged.
      CheckpointError: there is no such step.
    """
    self.wait()
    steps = form.steps_in(self.directory)
    if not steps and step is None:
      return None
    chosen, damaged = reader.good_step(self.directory, steps, step)
    step_directory = self.directory / str(chosen)
    description = form.read_description(step_directory)
    wanted = form.flatten(abstract_state)
    form.check_layout(
      step_directory, description['arrays'], form.layout(wanted)
    )
    arrays = form.read_arrays(step_directory, wanted)
    state = jax.tree.unflatten(
      jax.tree.structure(abstract_state), [arrays[name] for name in wanted]
    )
    self._position = chosen
    self._later = [later for later in steps if later > chosen]
    return Restored(state, description['extra'], chosen, damaged)

  def latest_step(self) -> int | None:
    """The newest complete checkpoint, damaged or not."""
    return max(form.steps_in(self.directory), default=None)

  def best_step(self) -> int | None:
    """The checkpoint with the best metric, the first of equal ones."""
    return self._best_among(form.steps_in(self.directory))

  def close(self) -> None:
    """Waits for the save under way and ends all threads."""
    try:
      self.wait()
    finally:
      self._manager.close()

  def _open(self) -> ocp.CheckpointManager:
    """A manager of what is on disk; leftovers of failed saves are removed."""
    self._saving = False
    self._remove_temporary()
    self._metrics = {
      step: description['metrics']
      for step, description in reader.read_descriptions(self.directory).items()
    }
    policies = AnyPreservationPolicy(
      [LatestN(self._keep), _KeepBest(self._best_among)]
    )
    return _Manager(
      self.directory,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=policies,
        # Metadata of old steps is not needed, and may be damaged.
        lightweight_initialize=True,
        save_root_metadata=False,
        async_options=ocp.options.AsyncOptions(
          post_finalization_callback=self._finish,
          # A full disk is noticed in the call that hits it.
          create_directories_asynchronously=False,
        ),
      ),
    )

  def _best_among(self, steps: Sequence[int]) -> int | None:
    metrics = {s: self._metrics[s] for s in steps if s in self._metrics}
    return reader.best_of(metrics, **self._best)

  def _remove_temporary(self) -> None:
    """Removes what failed or killed saves left; none may be under way."""
    if jax.process_index() == 0:
      for path in self.directory.glob(f'*{TEMPORARY}*'):
        # A write that failed late may still be adding files; the next save
        # removes what is left.
        shutil.rmtree(path, ignore_errors=True)

  def _finish(self) -> None:
    """Called by orbax when all arrays are written, before the final rename."""
    name = f'{self._description["step"]}{TEMPORARY}'
    form.finish(self.directory / name, self._description)

  def _failed(self, error: Exception) -> CheckpointError:
    step = self._description.get('step')
    self._saving = False
    self._remove_temporary()
    # A fresh manager: the old one counts the failed step as saved and those
    # it wanted to delete as deleted. Of several processes only this one knows
    # of the failure; it cannot go on, and building would wait for the others.
    if jax.process_count() == 1:
      self._manager = self._open()
    self._position = self.latest_step()
    return CheckpointError(
      f'saving step {step} to {self.directory} failed: '
      f'{type(error).__name__}: {error}'
    )

  def _check_position(self, step: int) -> None:
    if self._position is None and form.steps_in(self.directory):
      raise CheckpointError(
        f'{self.directory} has checkpoints of steps '
        f'{form.steps_in(self.directory)} that were not restored; restore '
        'one, or save to another directory'
      )
    if self._position is not None and step <= self._position:
      raise ValueError(
        f'step: expected more than {self._position}, the last one saved or '
        f'restored, got {step}'
      )

  def _set_aside_later(self) -> None:
    if not self._later:
      return
    if jax.process_index() == 0:
      for step in self._later:
        _move_into(self.directory / str(step), self.directory / SET_ASIDE)
    self._later = []
    self._manager.close()
    self._manager = self._open()


class _Manager(ocp.CheckpointManager):
  """A manager that leaves preemption to `PreemptionGuard`.

  At a preemption orbax 0.12.8 measures the time since the checkpoint before,
  which without its metadata has no time zone: the subtraction raises, after
  all data is safely written.
  """

  def reached_preemption(self, step: int) -> bool:
    """Never: the loop knows, and saves by itself."""
    return False


class _KeepBest:
  """An orbax preservation policy: keep the step that a function chooses."""

  def __init__(self, best_among: Callable[[Sequence[int]], int | None]):
    self._best_among = best_among

  def should_preserve(
    self, checkpoints: Sequence[Any], *, context: Any
  ) -> list[bool]:
    del context
    steps = [checkpoint.step for checkpoint in checkpoints]
    best = self._best_among(steps)
    return [step == best for step in steps]


def _move_into(path: pathlib.Path, folder: pathlib.Path) -> None:
  folder.mkdir(exist_ok=True)
  target, count = folder / path.name, 0
  while target.exists():
    count += 1
    target = folder / f'{path.name}.{count}'
  path.rename(target)
