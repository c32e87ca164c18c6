"""Starts a run from parameters of another, or of a published model."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from core import files
from core.errors import ConfigError
from dataset_lib import contract
from dataset_lib.source import DatasetInfo
from model_lib import convert, convert_images, convert_vit
from model_lib.convert_images import HALF, Pixels
from train_lib import checkpoint_io, sharding
from train_lib.build import Setup
from train_lib.run_directory import Path, trained_on
from train_lib.task import Task

NEARLY_ALL = 0.9  # of the parameters: heads may be new

# Fields of a published model that the shapes of its parameters do not show.
_UNSEEN = {
  'num_heads', 'activation', 'pooler_activation', 'norm_epsilon',
  'global_every', 'local_window', 'global_base', 'local_base',
}  # fmt: skip


def start_from(setup: Setup) -> Any:
  """Returns a fresh state with the parameters of `config.warm_start`.

  Also with the model state of a run, if the model has one. The source is
  checked before anything is compiled.
  """
  config, task, shapes = setup.config.warm_start, setup.task, setup.abstract
  if not config.workdir:
    return setup.init()
  _check_source(config, task)
  source = config.workdir, config.renames, config.skip
  try:
    of_task = task.config['model'], task.info
    loaded = warm_start(shapes.params, *source, *of_task)
    model_state: Any = None
    if jax.tree.leaves(shapes.model_state):  # as the start of a looped model
      saved = checkpoint_io.find(config.workdir)
      model_state = saved.read('model_state/', shapes.model_state)
  except (ValueError, checkpoint_io.CheckpointError) as error:
    expected = f'a checkpoint that fits the model: {error}'
    raise ConfigError('warm_start.workdir', config.workdir, expected) from error
  state: Any = setup.init()
  params = jax.tree.map(
    lambda fresh, new: new if isinstance(new, jax.Array) else fresh,
    state.params, loaded,
  )  # fmt: skip
  # A copy: the state is donated, and no buffer may be donated twice.
  average = None if state.ema_params is None else jax.tree.map(jnp.copy, params)
  model_state = model_state or state.model_state
  return state.replace(
    params=params, model_state=model_state, ema_params=average
  )


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

  base, more = shapes(0), shapes(1)
  return sorted(name for name in base if base[name].shape != more[name].shape)


def warm_start(
  params: Any,
  directory: Path,
  renames: Sequence[str] = (),
  skip: Sequence[str] = (),
  model: Any = (),
  info: DatasetInfo | None = None,
) -> Any:
  """Replaces fresh parameters with a checkpoint's (EMA if present).

  Nothing is cast, except a published model in half or double precision;
  positions of patches are resized. What is loaded, stays fresh and is not used
  is logged.

  Args:
    params: arrays or their shapes, which stay where no array replaces them;
      structure and shardings are kept.
    directory: of the run, its checkpoints or a published model, or its file.
    renames: 'old->new', applied in turn to the names by `re.sub`.
    skip: regular expressions, e.g. `^head/`, searched in the (new) names and
      the model's; matches keep fresh values.
    model: its fields, which a published model must agree with.
    info: of the images, None for squares in [-1, 1].

  Raises ValueError if a rename or a skip matches nothing, parameters are left
  over on either side or differ in shape or dtype, or no file can be used.
  """
  source, fit = _read(directory, params, info)
  saved, fresh = map(checkpoint_io.flatten, (source.params, params))
  saved, skipped = _selected(saved, fresh, directory, renames, skip)
  saved = convert_images.resize(saved, fresh, source.image, _sides(info))
  kept = fit(saved, fresh)
  heads = {n for n in saved if n.partition('/')[0] in convert_vit.HEADS}
  heads -= kept | skipped
  if info and heads:
    order = contract.order_of_head(source.class_names, info.class_names)
    saved |= {n: saved[n][..., order] for n in heads}
  used, wanted = (
    {name: leaf for name, leaf in tree.items() if name not in skipped | kept}
    for tree in (saved, fresh)
  )
  layouts = checkpoint_io.layout(used), checkpoint_io.layout(wanted)
  _check_fields(directory, source.fields, dict(model), layouts[0] == layouts[1])
  checkpoint_io.check_layout(directory, *layouts)
  _log(directory, used, fresh, saved, source.ignored)
  for name, array in used.items():
    fresh[name] = jax.device_put(array, fresh[name].sharding)
  return jax.tree.unflatten(jax.tree.structure(params), list(fresh.values()))


def _check_fields(
  directory: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any], fit: bool
) -> None:
  """Raises ConfigError of all fields of the model that differ from `theirs`.

  Where all shapes `fit`, another depth is meant, as that of a student.
  """
  names = [name for name, x in theirs.items() if ours.get(name, x) != x]
  if not names or (fit and not _UNSEEN.intersection(names)):
    return
  expected, got = ({n: x[n] for n in names} for x in (theirs, ours))
  raise ConfigError('model', got, f'{expected}, as in {directory}')


def _log(
  directory: Path,
  used: Mapping[str, Any],
  fresh: Mapping[str, Any],
  saved: Mapping[str, Any],
  ignored: Sequence[str],
) -> None:
  """Prints how many parameters are loaded, and modules of one side only.

  Warns unless nearly all of the model are loaded: all but heads.
  """
  loaded, total = (_size(tree.values()) for tree in (used, fresh))
  new, left = (_modules(tree, {*tree} - {*used}) for tree in (fresh, saved))
  line = (
    f'{directory}: loaded {loaded} of {total} parameters; '
    f'new: {", ".join(new) or "none"}; '
    f'not used: {", ".join([*left, *ignored]) or "none"}'
  )
  if _count(used.values()) < NEARLY_ALL * _count(fresh.values()):
    logging.warning('%s', line)
  else:
    print(files.printable(line))


def _count(arrays: Collection[Any]) -> int:
  return sum(array.size for array in arrays)


def _size(arrays: Collection[Any]) -> str:
  count = _count(arrays)
  return f'{count / 1e6:.1f} M' if count >= 50_000 else f'{count:,}'


def _modules(tree: Mapping[str, Any], names: Collection[str]) -> list[str]:
  """Returns the largest modules with no other parameters, and their sizes."""

  def parents(name: str) -> list[str]:
    return [*itertools.accumulate(name.split('/'), '{}/{}'.format)]

  mixed = {x for name in {*tree} - {*names} for x in parents(name)}
  leaves = collections.defaultdict(list)
  for name in sorted(names):
    module = next(x for x in parents(name) if x not in mixed)
    leaves[re.sub(r'block_\d+', 'block_*', module)].append(tree[name])
  return [f'{name} ({_size(leaves[name])})' for name in leaves]


def _read(
  directory: Path, params: Any, info: DatasetInfo | None
) -> tuple[convert.Checkpoint, Callable[[Any, Any], set[str]]]:
  """Reads a source, and `fit(saved, fresh)`: names that keep fresh values."""
  if convert_vit.is_vit(directory):
    pixels = Pixels(info.mean, info.std) if info else HALF
    return convert_vit.load(directory, pixels), convert_vit.fit
  if convert.is_checkpoint(directory):
    heads = 'pretraining' if 'predictions' in params else 'classifier'
    return convert.load(directory, heads), convert.fit
  saved, theirs = checkpoint_io.find(directory), trained_on(directory)
  source = convert.Checkpoint(saved.params(), {}, (), (), _sides(theirs))
  if info and info.input_key == 'image':
    # Another model may hold the ViT of a run; a head of other classes may not.
    return source, lambda ours, new: convert_vit.fit(ours, new) - {*ours}
  return source, lambda *trees: set()


def _sides(info: DatasetInfo | None) -> convert_images.Sides:
  if info and info.input_key == 'image':
    return info.input_shape[0], info.input_shape[1]
  return convert_images.SQUARE


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
