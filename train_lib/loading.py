"""Reads a run back: to evaluate it, to serve it, to start from it."""

import collections
import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from absl import logging

from core import files, registry
from core.errors import ConfigError, InvalidDataError
from dataset_lib import builder, contract, tokenizer
from dataset_lib.source import DatasetInfo
from model_lib import convert, convert_vit, position_grids
from model_lib.convert_pixels import HALF, Pixels
from train_lib import checkpoint_io, config_schema, sharding
from train_lib.run_directory import (
  CONFIG,
  DATASET_INFO,
  MANIFEST,
  TOKENIZER,
  Path,
  load_info,
  parse_info,
  read_config,
  trained_on,
)
from train_lib.task import ServedRun, Task, build_task


@dataclasses.dataclass(frozen=True)
class Trained:
  """A checkpoint and its task."""

  saved: checkpoint_io.Saved
  task: Task
  mesh: jax.sharding.Mesh | None  # None for the first device

  @functools.cached_property
  def variables(self) -> dict[str, Any]:
    """`{'params': ..., 'model_state': ...}` on the mesh, EMA if present."""
    boxed = jax.eval_shape(self.task.init, jax.random.key(0))
    params, model_state = sharding.abstract(boxed, self.mesh)
    state = self.saved.read('model_state/', model_state)
    return {'params': self.saved.params(params), 'model_state': state}


def split_of(config: Any, split: str) -> str:
  """Returns the split, or the run's first; ConfigError of '--split'."""
  splits = (entry.get('split') for entry in config.evals.values())
  split = split or next(filter(None, splits), 'test')
  try:
    builder.check_split(config.dataset, split)
  except ConfigError as error:
    raise ConfigError('--split', error.given, error.expected) from error
  return split


def load_config(
  workdir: Path, key: str = '--workdir'
) -> ml_collections.ConfigDict:
  """Returns the complete configuration of a run, without paths to other runs.

  Raises ConfigError of `key` if `workdir` has no run, InvalidDataError for a
  damaged configuration, and ConfigError of the file for an illegal field or
  another preparation than that of the contract.
  """
  path = pathlib.Path(workdir) / CONFIG
  registry.keep_out(workdir)
  if not path.is_file():
    expected = f'the directory of a run, with a {CONFIG}'
    raise ConfigError(key, str(workdir), expected)
  with files.damage_of(path):
    values, own = read_config(path), path.with_name(TOKENIZER)
    values['warm_start']['workdir'] = ''
    if 'teacher' in values['loss']:
      values['loss']['teacher'] = ''
    if 'tokenizer' in values['dataset'] and own.is_file():
      values['dataset']['tokenizer'] = str(own)
    if values['dataset'].get('max_length') == 0:  # of the train rows, which
      contract_of_run = load_info(workdir)  # may be gone
      values['dataset'] |= {
        'max_length': contract_of_run.input_shape[0],
        'length_buckets': contract_of_run.length_buckets,
      }
    for group in ('model', 'evals'):
      if not isinstance(values.get(group, {}), dict):
        raise TypeError(f'{group}: expected a group of fields')
  try:
    config = config_schema.validate(values).unlock()
    if path.with_name(DATASET_INFO).exists():
      info = load_info(workdir)
      prepared = builder.preprocessing(config.dataset)
      data = dataclasses.replace(info, preprocessing=prepared)
      contract.check(info, data, [*info.preprocessing], 'dataset')
  except ConfigError as error:
    field = f'{key}: {path}: {error.field}'
    raise ConfigError(field, error.given, error.expected) from error
  return config


def restore(
  workdir: Path,
  config: Any,
  step: int | str | None = None,
  mesh: jax.sharding.Mesh | None = None,
) -> Trained:
  """Finds a checkpoint; see `checkpoint_io.find` for `step` and errors.

  Raises InvalidDataError if the contract of the run is not that of the
  checkpoint, and ConfigError for another tokenizer.
  """
  saved, info = checkpoint_io.find(workdir, step), load_info(workdir)
  with files.damage_of(saved.path / MANIFEST):
    kept = saved.extra.get('contract')  # none in older ones
    trained = info if kept is None else parse_info(kept)
  for one in contract.differences(trained, info, is_copy=True):
    change = f'was changed after step {saved.step}: {one}; restore it'
    raise InvalidDataError(f'{pathlib.Path(workdir) / DATASET_INFO} {change}')
  path = config.dataset.get('tokenizer', '')
  if 'tokenizer' in info.preprocessing and os.path.exists(path):
    prepared = tokenizer.load(path).preprocessing(0)
    own = dataclasses.replace(info, preprocessing=prepared)
    contract.check(info, own, contract.TOKENS, 'dataset', f'{workdir} has')
  # Older checkpoints have a name; see `phases.of_older`.
  names = [one.name for one in config.phases]
  phase = saved.extra.get('phase', saved.extra.get('stage'))
  index = names.index(phase) if phase in names else phase
  if index not in range(len(names)):
    raise ConfigError('phases', names, f'that of the checkpoint, {phase}')
  task = build_task(config, info, config.phases[index].model)
  return Trained(saved, task, mesh)


def serve(
  workdir: Path,
  *,
  step: int | str | None = None,
  lengths: Sequence[int] | None = None,
  options: Mapping[str, Any] | None = None,
  on_drift: Callable[[bool, dict[str, Any]], None] | None = None,
) -> tuple[Any, Any, tuple[int, ...]]:
  """Returns chain, policy and lengths: `with Engine(*serve('/tmp/run')) as e:`.

  Args:
    step: a number, 'best', or None for the newest good one.
    lengths: buckets in tokens (of AdaTape: tape tokens), None for those of the
      data or the model; longer texts are cut off.
    options: of the model's family, as {'tau': 0.8}; see docs/serving.md.
    on_drift: called when drift begins or ends.

  Raises ConfigError for an illegal argument or a run that is not served, and
  CheckpointError if no undamaged checkpoint matches.
  """
  directory = os.fspath(workdir)
  buckets = None if lengths is None else tuple(lengths)
  trained = restore(directory, load_config(directory, 'workdir'), step)
  run = ServedRun(directory, trained.saved.step, buckets, on_drift)
  # Options are checked before the parameters are read.
  serve_variables = trained.task.prepare_serving(options or {}, run)
  served: tuple[Any, Any] = serve_variables(trained.variables)
  return *served, served[1].lengths


def start_from(state: Any, config: Any, task: Task) -> Any:
  """Returns a fresh state with the parameters of `config.warm_start`.

  Also with the model state of a run, if the model has one.
  """
  if not config.workdir:
    return state
  _check_source(config, task)
  source = config.workdir, config.renames, config.skip
  try:
    model, info = task.config['model'], task.info
    params = warm_start(state.params, *source, model, info)
    model_state = state.model_state
    if jax.tree.leaves(model_state):  # such as the start of a looped model
      shapes = jax.tree.map(_abstract, model_state)
      own = checkpoint_io.find(config.workdir)
      model_state = own.read('model_state/', shapes)
  except (ValueError, checkpoint_io.CheckpointError) as error:
    expected = f'a checkpoint that fits the model: {error}'
    raise ConfigError('warm_start.workdir', config.workdir, expected) from error
  # A copy: the state is donated, and no buffer may be donated twice.
  average = None if state.ema_params is None else jax.tree.map(jnp.copy, params)
  return state.replace(
    params=params, model_state=model_state, ema_params=average
  )


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _check_source(config: Any, task: Task) -> None:
  """Raises ConfigError if a run has other inputs, or heads of other classes."""
  if (theirs := trained_on(config.workdir)) is None:
    return
  whose = f'{config.workdir} has'
  inputs = 'input_key', *contract.SCALING, *contract.TOKENS
  contract.check(theirs, task.info, inputs, 'warm_start', whose)
  classes = contract.differences(theirs, task.info, contract.LABELS)
  heads = _of_classes(task) if classes else []
  if [n for n in heads if not any(re.search(p, n) for p in config.skip)]:
    whose += f'; skip {", ".join(heads)} by warm_start.skip'
    raise classes[-1].error('warm_start', whose)


def _of_classes(task: Task) -> list[str]:
  """Returns the names of the parameters whose shape has the classes."""

  def shapes(more: int) -> dict[str, Any]:
    count = task.info.num_classes + more
    info = dataclasses.replace(task.info, num_classes=count, class_names=())
    other = type(task)(task.config, info)
    params, _ = jax.eval_shape(other.init, jax.random.key(0))
    return checkpoint_io.flatten(sharding.unbox(params))

  one, more = shapes(0), shapes(1)
  return sorted(name for name in one if one[name].shape != more[name].shape)


def warm_start(
  params: Any,
  directory: Path,
  renames: Sequence[str] = (),
  skip: Sequence[str] = (),
  model: Any = (),
  info: DatasetInfo | None = None,
) -> Any:
  """Replaces fresh parameters with those (EMA if present) of a checkpoint.

  Nothing is cast, except a published model in half or double precision;
  positions of patches are resized. What a published model leaves fresh, or has
  for other tasks, is logged.

  Args:
    params: their structure and shardings are kept.
    directory: of the run, its checkpoints or a published model, or its file.
    renames: 'old->new', applied in turn to the names by `re.sub`.
    skip: regular expressions, e.g. `^head/`, searched in the (new) names and
      those of the model; matches keep fresh values.
    model: fields of the model that a ViT's file must agree with.
    info: of the images, None for squares in [-1, 1].

  Raises ValueError if a rename or a skip matches nothing, parameters are left
  over on either side or differ in shape or dtype, or no file can be used.
  """
  source, fit = _read(directory, params, dict(model), info)
  saved, fresh = map(checkpoint_io.flatten, (source.params, params))
  saved, skipped = _selected(saved, fresh, directory, renames, skip)
  saved = position_grids.resize(saved, fresh, source.image, _sides(info))
  kept = fit(saved, fresh)
  heads = ({'head/kernel', 'head/bias'} & {*saved}) - kept - skipped
  if info and heads:
    order = contract.order_of_head(source.class_names, info.class_names)
    saved |= {name: saved[name][..., order] for name in heads}
  if kept or source.ignored:
    unused = sorted({*source.ignored, *(kept - {*fresh})})
    new = sorted((skipped | kept) & {*fresh})
    message = '%s: not used: %s; keep fresh values: %s'
    logging.warning(message, directory, unused, new)
  used, wanted = (
    {name: leaf for name, leaf in tree.items() if name not in skipped | kept}
    for tree in (saved, fresh)
  )
  layouts = map(checkpoint_io.layout, (used, wanted))
  checkpoint_io.check_layout(directory, *layouts)
  for name, leaf in wanted.items():
    fresh[name] = jax.device_put(used[name], leaf.sharding)
  return jax.tree.unflatten(jax.tree.structure(params), list(fresh.values()))


def _read(
  directory: Path, params: Any, model: dict[str, Any], info: DatasetInfo | None
) -> tuple[convert.Checkpoint, Callable[[Any, Any], set[str]]]:
  """Reads a source, and `fit(saved, fresh)`: names that keep fresh values."""
  if convert_vit.is_vit(directory):
    pixels = Pixels(info.mean, info.std) if info else HALF
    published = convert_vit.load(directory, pixels)
    for name, value in published.fields.items():
      if model.get(name, value) != value:
        expected = f'{value!r}, as in {directory}'
        raise ConfigError(f'model.{name}', model[name], expected)
    return published, convert_vit.fit
  if convert.is_checkpoint(directory):
    heads = 'pretraining' if 'predictions' in params else 'classifier'
    return convert.load(directory, heads), convert.fit
  own = checkpoint_io.find(directory)
  image = _sides(trained_on(directory))
  source = convert.Checkpoint(own.params(), {}, (), (), image)
  return source, lambda *trees: set()


def _sides(info: DatasetInfo | None) -> position_grids.Sides:
  if info and info.input_key == 'image':
    return info.input_shape[0], info.input_shape[1]
  return position_grids.SQUARE


def _selected(
  saved: dict[str, Any],
  fresh: Mapping[str, Any],
  directory: Path,
  renames: Sequence[str],
  skip: Sequence[str],
) -> tuple[dict[str, Any], set[str]]:
  """Returns the renamed parameters, and the names that `skip` matches."""
  unmatched, skipped = [], set()
  for rename in renames:
    old, _, new = rename.partition('->')
    unmatched += [] if any(re.search(old, name) for name in saved) else [rename]
    names = collections.Counter(re.sub(old, new, name) for name in saved)
    name, count = names.most_common(1)[0] if names else ('', 0)
    if count > 1:
      become = f'{count} parameters of the checkpoint become {name!r}'
      raise ValueError(f'warm_start.renames: {become}')
    saved = dict(zip(names, saved.values(), strict=True))
  for pattern in skip:
    hits = {name for name in {*saved, *fresh} if re.search(pattern, name)}
    unmatched += [] if hits else [pattern]
    skipped |= hits
  if unmatched:
    raise ValueError(
      f'warm_start: {unmatched} match no parameter of {directory}; it has\n  '
      + checkpoint_io.shortened(sorted(saved))
    )
  return saved, skipped
