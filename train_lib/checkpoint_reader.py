"""Choosing a good checkpoint of a run, and reading its parameters alone."""

import contextlib
import math
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from train_lib import checkpoint_format as form
from train_lib.checkpoint_format import (
  CheckpointError,
  CheckpointWarning,
  CorruptCheckpointError,
)
from train_lib.run_directory import CHECKPOINTS

MODES = {'max': 1.0, 'min': -1.0}


class RestoredParams(NamedTuple):
  """What `restore_params` found; params and model_state are dictionaries."""

  params: Any
  model_state: Any
  step: int
  extra: dict[str, Any]


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
    abstract_params: the wanted parameters with shardings; without it they
      come as nested dictionaries of NumPy arrays.

  Raises:
    CheckpointError: there is no such checkpoint.
    CorruptCheckpointError: the step, or every step, is damaged.
    CheckpointMismatchError: the parameters are not the wanted ones.
  """
  root = find_checkpoints(directory)
  chosen = _choose(root, step)
  step_directory = root / str(chosen)
  description = form.read_description(step_directory)
  saved = description['arrays']
  has_average = any(name.startswith('ema_params/') for name in saved)
  prefix = 'ema_params/' if average and has_average else 'params/'
  wanted = {
    name: jax.ShapeDtypeStruct(shape, dtype)
    for name, (dtype, shape) in saved.items()
    if name.startswith((prefix, 'model_state/'))
  }
  if abstract_params is not None:
    asked = form.flatten(abstract_params, prefix)
    found = {name: saved[name] for name in wanted if name.startswith(prefix)}
    form.check_layout(step_directory, found, form.layout(asked))
    wanted |= asked
  arrays = form.read_arrays(step_directory, wanted)
  params = form.nest(arrays, prefix)
  if abstract_params is not None:
    params = jax.tree.unflatten(
      jax.tree.structure(abstract_params), [arrays[name] for name in asked]
    )
  return RestoredParams(
    params, form.nest(arrays, 'model_state/'), chosen, description['extra']
  )


def checkpoint_extra(
  directory: str | os.PathLike[str], step: int | str | None = None
) -> dict[str, Any]:
  """The JSON values that were saved with a checkpoint; see `restore_params`."""
  root = find_checkpoints(directory)
  return form.read_description(root / str(_choose(root, step)))['extra']


def _choose(root: pathlib.Path, step: int | str | None) -> int:
  if step == 'best':
    step = _best_recorded(root)
  return good_step(root, form.steps_in(root), step)[0]


def find_checkpoints(directory: str | os.PathLike[str]) -> pathlib.Path:
  """The folder of checkpoints of a workdir, or the directory itself."""
  root = pathlib.Path(directory).absolute()
  return root / CHECKPOINTS if (root / CHECKPOINTS).is_dir() else root


def good_step(
  root: pathlib.Path, steps: list[int], exact: int | str | None
) -> tuple[int, tuple[str, ...]]:
  """The newest good step, or the exact one, and damage in newer ones."""
  if not steps or (exact is not None and exact not in steps):
    raise CheckpointError(
      f'{root} has no checkpoint{"" if exact is None else f" of step {exact}"}'
      f'; it has {steps or "none"}'
    )
  candidates = steps[::-1] if exact is None else [int(exact)]
  chosen = -1
  damaged: list[str] = []
  if jax.process_index() == 0:
    for step in candidates:
      problems = form.verify(root / str(step))
      if not problems:
        chosen = step
        break
      damaged.extend(problems)
  if jax.process_count() > 1:  # one reads all bytes, all take its word
    chosen = int(multihost_utils.broadcast_one_to_all(np.int32(chosen)))
  lines = form.shortened(damaged)
  if chosen < 0:
    raise CorruptCheckpointError(
      f'no good checkpoint among steps {candidates} of {root}:\n  {lines}'
    )
  if damaged:
    warnings.warn(
      f'DAMAGED CHECKPOINT, going back to step {chosen}:\n  {lines}',
      CheckpointWarning,
      stacklevel=3,
    )
  return chosen, tuple(damaged)


def read_descriptions(root: pathlib.Path) -> dict[int, dict[str, Any]]:
  """The descriptions of all checkpoints, by step, where they are readable."""
  descriptions = {}
  for step in form.steps_in(root):
    # Damage is no matter here: whoever restores the step will be told.
    with contextlib.suppress(OSError, ValueError):
      descriptions[step] = form.read_description(root / str(step))
  return descriptions


def best_of(
  metrics: Mapping[int, Mapping[str, Any]], metric: str, mode: str
) -> int | None:
  """The step with the best value, the first of equal ones.

  Args:
    metrics: by step.
    metric: the name that counts; steps without it, or with a value that is
      not finite, are left out.
    mode: 'max' or 'min'.
  """
  scores = {
    step: MODES[mode] * float(values[metric])
    for step, values in metrics.items()
    if metric in values and math.isfinite(float(values[metric]))
  }
  return max(scores, key=lambda step: (scores[step], -step), default=None)


def _best_recorded(root: pathlib.Path) -> int:
  """The best step, by the metric and mode of the newest checkpoint."""
  descriptions = read_descriptions(root)
  best = None
  if descriptions:
    newest = descriptions[max(descriptions)]
    metrics = {step: d['metrics'] for step, d in descriptions.items()}
    best = best_of(metrics, **newest['best'])
  if best is None:
    raise CheckpointError(
      f'{root} has no best checkpoint: no metric was recorded; set '
      'checkpoint.best_metric in the run, or give a step'
    )
  return best
