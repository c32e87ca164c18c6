"""Reads a run back: to evaluate it, to serve it."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_collections

from core import files, registry
from core.errors import ConfigError, InvalidDataError
from dataset_lib import builder, contract, tokenizer
from train_lib import checkpoint_io, config_schema, sharding
from train_lib.run_directory import (
  CONFIG,
  DATASET_INFO,
  MANIFEST,
  TOKENIZER,
  Path,
  load_info,
  parse_info,
)
from train_lib.task import ServedRun, Task, build_task

OLDER = '; a run of an older version is read by commit 87a76c19: train it again'


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
    inside = sorted(str(p.parent) for p in path.parent.glob(f'*/{CONFIG}'))
    expected = f'the directory of a run, with a {CONFIG}'
    expected += f', such as {" or ".join(inside[:5])}' if inside else ''
    raise ConfigError(key, str(workdir), expected)
  with files.damage_of(path):
    values, tokenizer_file = files.read_object(path), path.with_name(TOKENIZER)
    values['warm_start']['workdir'] = ''
    if 'teacher' in values['loss']:
      values['loss']['teacher'] = ''
    if 'tokenizer' in values['dataset'] and tokenizer_file.is_file():
      values['dataset']['tokenizer'] = str(tokenizer_file)
    for group in ('model', 'evals', 'dataset'):
      if not isinstance(values.get(group, {}), dict):
        raise TypeError(f'{group}: expected a group of fields')
    has_contract = path.with_name(DATASET_INFO).exists()
    # Lengths of the train rows, which may be gone.
    if has_contract and values['dataset'].get('max_length') == 0:
      saved = load_info(workdir)
      values['dataset']['max_length'] = saved.input_shape[0]
      values['dataset']['length_buckets'] = saved.length_buckets
  try:
    config = config_schema.validate(values).unlock()
    if has_contract:
      info = load_info(workdir)
      prepared = builder.preprocessing(config.dataset)
      data = dataclasses.replace(info, preprocessing=prepared)
      contract.check(info, data, [*info.preprocessing], 'dataset')
  except ConfigError as error:
    field, expected = f'{key}: {path}: {error.field}', error.expected
    expected += OLDER if expected.startswith('no such field') else ''
    raise ConfigError(field, error.given, expected) from error
  return config


def _moved(*names: str) -> bool:
  """Returns True if a class has its name in another module."""
  return len({name.rpartition(':')[2] for name in names}) == 1


def restore(
  workdir: Path,
  config: Any,
  step: int | str | None = None,
  mesh: jax.sharding.Mesh | None = None,
) -> Trained:
  """Finds a checkpoint; see `checkpoint_io.find` for `step` and errors.

  Raises InvalidDataError if the contract or the model of the run are not those
  of the checkpoint, and ConfigError for another tokenizer.
  """
  saved, info = checkpoint_io.find(workdir, step), load_info(workdir)
  with files.damage_of(saved.path / MANIFEST):
    trained = parse_info(saved.extra['contract'])
    model = dict(saved.extra.get('model', {}))  # older runs did not save it
  given = files.read_object(pathlib.Path(workdir) / CONFIG)['model']
  changed = [
    (CONFIG, contract.Difference(f'model.{name}', value, given[name]))
    for name, value in model.items() if given.get(name, value) != value
    and not (name == 'name' and _moved(value, given[name]))
  ]  # fmt: skip
  diffs = contract.differences(trained, info, is_copy=True)
  for file, difference in [*((DATASET_INFO, one) for one in diffs), *changed]:
    change = f'was changed after step {saved.step}: {difference}; restore it'
    raise InvalidDataError(f'{pathlib.Path(workdir) / file} {change}')
  path = config.dataset.get('tokenizer', '')
  if 'tokenizer' in info.preprocessing and os.path.exists(path):
    prepared = tokenizer.load(path).preprocessing(0)
    current = dataclasses.replace(info, preprocessing=prepared)
    contract.check(info, current, contract.TOKENS, 'dataset', f'{workdir} has')
  index, phases = saved.extra.get('phase'), config.phases
  if index not in range(len(phases)):
    names = [phase.name for phase in phases]
    raise ConfigError('phases', names, f'that of the checkpoint, {index}')
  return Trained(saved, build_task(config, info, phases[index].model), mesh)


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
    lengths: buckets in tokens (of AdaTape: tape tokens), None for the buckets
      of the data or the model; longer texts are cut off.
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
