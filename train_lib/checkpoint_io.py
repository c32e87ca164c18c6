"""The files of a checkpoint: named arrays, a description and a manifest.

    <directory>/<step>/                arrays, written by orbax
    <directory>/<step>/checkpoint.json step, extra, metrics, shape and dtype
                                       of every array
    <directory>/<step>/manifest.json   size and CRC-32 of all these files

A state is stored as nested dictionaries named by its paths, such as
`params/encoder/kernel` or `opt_state/0/mu/encoder/kernel`, so a checkpoint
does not depend on the Python classes that made it. orbax reads flipped bits
without complaint; the manifest is verified before anything is read.
"""

import concurrent.futures
import contextlib
import json
import pathlib
import warnings
import zlib
from collections.abc import Mapping
from math import isfinite
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from train_lib import strict_json

DESCRIPTION = 'checkpoint.json'
MANIFEST = 'manifest.json'
MODES = {'max': 1.0, 'min': -1.0}
# orbax writes these after the manifest. Restoring does not need them.
WRITTEN_LATER = ('_CHECKPOINT_METADATA', 'commit_success.txt')
_CHUNK = 1 << 20  # bytes
_THREADS = 4  # zlib and reading both release the interpreter lock


class CheckpointError(RuntimeError):
  """A checkpoint could not be written, or none can be read."""


class CorruptCheckpointError(CheckpointError):
  """Files differ from those written; the message names them."""


class CheckpointMismatchError(ValueError):
  """The checkpoint holds other arrays than asked for; names their paths."""


class CheckpointWarning(UserWarning):
  """A damaged checkpoint was skipped."""


def steps_in(directory: pathlib.Path) -> list[int]:
  """Returns the steps that have a complete checkpoint, ascending."""
  return sorted(int(p.name) for p in directory.glob('*') if p.name.isdecimal())


def good_step(root: pathlib.Path, exact: int | str | None = None) -> int:
  """Returns the newest undamaged step, or the exact one if it is undamaged.

  Warns with a line for each damaged file of newer steps.

  Raises:
    CheckpointError: there is no such step.
    CorruptCheckpointError: the step, or every step, is damaged.
  """
  steps = steps_in(root)
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
      problems = verify(root / str(step))
      if not problems:
        chosen = step
        break
      damaged.extend(problems)
  if jax.process_count() > 1:  # one process verifies for all
    chosen = int(multihost_utils.broadcast_one_to_all(np.int32(chosen)))
  lines = shortened(damaged)
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
  return chosen


def best_step(
  root: pathlib.Path, rule: Mapping[str, str] | None = None
) -> int | None:
  """Returns the step with the best finite value, the first of equal ones.

  Args:
    root: the folder of checkpoints.
    rule: `metric`, its name, and `mode`, 'max' or 'min'; None for the rule
      that the newest checkpoint recorded.
  """
  found = {}
  for step in steps_in(root):
    # `restore` reports damaged files.
    with contextlib.suppress(OSError, ValueError):
      found[step] = read_description(root / str(step))
  if not found:
    return None
  rule = rule or found[max(found)]['best']
  values = {
    step: MODES[rule['mode']] * float(description['metrics'][rule['metric']])
    for step, description in found.items()
    if rule['metric'] in description['metrics']
  }
  finite = {step: value for step, value in values.items() if isfinite(value)}
  return max(finite, key=lambda step: (finite[step], -step), default=None)


def flatten(tree: Any, prefix: str = '') -> dict[str, Any]:
  """Returns the leaves of a pytree by name.

  Raises:
    TypeError: if a leaf is not an array, or an array of typed PRNG keys.
  """
  flat = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = prefix + '/'.join(map(_part, path))
    if not hasattr(leaf, 'dtype') or not hasattr(leaf, 'shape'):
      raise TypeError(
        f'{name}: expected an array, got {type(leaf).__name__}; pass other '
        'values as `extra`'
      )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      raise TypeError(
        f'{name}: expected a plain array, got typed PRNG keys; store '
        'jax.random.key_data of them'
      )
    flat[name] = leaf
  return flat


def nest(flat: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Returns nested dictionaries of the leaves whose name has the prefix."""
  nested: dict[str, Any] = {}
  for name, leaf in flat.items():
    if not name.startswith(prefix):
      continue
    *parents, last = name[len(prefix) :].split('/')
    node = nested
    for parent in parents:
      node = node.setdefault(parent, {})
    node[last] = leaf
  return nested


def layout(flat: Mapping[str, Any]) -> dict[str, list[Any]]:
  """Returns dtype and shape by name, as the description stores them."""
  return {
    name: [str(leaf.dtype), list(leaf.shape)] for name, leaf in flat.items()
  }


def check_layout(
  where: object, saved: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
  """Compares two layouts; nothing is ever cast.

  Raises:
    CheckpointMismatchError: if a name is missing from one of them, or a
      shape or dtype differs.
  """
  lines = [
    f'{name}: expected {_words(wanted.get(name))}, got '
    f'{_words(saved.get(name))}'
    for name in sorted(saved.keys() | wanted.keys())
    if saved.get(name) != wanted.get(name)
  ]
  if lines:
    raise CheckpointMismatchError(
      f'{where} does not hold the arrays of this model:\n  '
      + shortened(lines)
      + '\nUse the configuration it was written with, or a warm start with '
      'explicit renames.'
    )


def shortened(lines: list[str]) -> str:
  """Joins at most 20 lines, and counts the rest."""
  rest = [f'and {len(lines) - 20} more'] if len(lines) > 20 else []
  return '\n  '.join(lines[:20] + rest)


def read_description(path: pathlib.Path) -> dict[str, Any]:
  """Reads `checkpoint.json`: step, extra, metrics, best, arrays."""
  with (path / DESCRIPTION).open(encoding='utf-8') as file:
    return json.load(file)


def read_tree(path: pathlib.Path, abstract: Any, prefix: str = '') -> Any:
  """Reads the arrays whose name starts with a prefix.

  Args:
    path: the folder of the step.
    abstract: the wanted structure, with shardings; None for nested
      dictionaries of NumPy arrays.
    prefix: of the names.

  Raises:
    CheckpointMismatchError: the arrays are not the wanted ones.
  """
  saved = {
    name: entry
    for name, entry in read_description(path)['arrays'].items()
    if name.startswith(prefix)
  }
  if abstract is None:
    wanted = {n: jax.ShapeDtypeStruct(x[1], x[0]) for n, x in saved.items()}
    return nest(read_arrays(path, wanted), prefix)
  wanted = flatten(abstract, prefix)
  check_layout(path, saved, layout(wanted))
  arrays = read_arrays(path, wanted)
  leaves = [arrays[name] for name in wanted]
  return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def read_arrays(
  path: pathlib.Path, wanted: Mapping[str, Any]
) -> dict[str, Any]:
  """Reads the named arrays of a checkpoint whose layout has been checked.

  Args:
    path: the folder of the step.
    wanted: by name, a leaf with a shape, a dtype and optionally a sharding.

  Returns:
    By name, an array with that sharding, or a NumPy array without one.
  """
  if not wanted:
    return {}
  structure, arguments = {}, {}
  for name, leaf in wanted.items():
    structure[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    arguments[name] = ocp.RestoreArgs(restore_type=np.ndarray)
    if getattr(leaf, 'sharding', None) is not None:
      arguments[name] = ocp.ArrayRestoreArgs(
        sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
      )
  options = ocp.args.PyTreeRestore(
    nest(structure), restore_args=nest(arguments), partial_restore=True
  )
  with ocp.PyTreeCheckpointer() as checkpointer:
    return flatten(checkpointer.restore(path, args=options))


def finish(path: pathlib.Path, description: Mapping[str, Any]) -> None:
  """Writes description and manifest into a folder of written arrays."""
  (path / DESCRIPTION).write_text(strict_json.dumps(description))
  names = (
    file.relative_to(path).as_posix()
    for file in path.rglob('*')
    if file.is_file()
  )
  listed = sorted(set(names) - {MANIFEST, *WRITTEN_LATER})
  (path / MANIFEST).write_text(_encode(_measure_all(path, listed)))


def verify(path: pathlib.Path) -> tuple[str, ...]:
  """Compares the files of a checkpoint with its manifest.

  Unlisted files are ignored.

  Returns:
    One line per damaged file, with its path.
  """
  manifest = path / MANIFEST
  try:
    text = manifest.read_text(encoding='utf-8')
    listed = json.loads(text)['files']
    inside = all(
      not pathlib.PurePosixPath(name).is_absolute()
      and '..' not in pathlib.PurePosixPath(name).parts
      for name in listed
    )
    # Any change of the manifest itself counts, even of its white space.
    if text != _encode(listed) or not inside:
      return (f'{manifest}: differs from the one written',)
  except FileNotFoundError:
    return (f'{manifest}: is missing',)
  except (OSError, ValueError, TypeError, LookupError) as error:
    return (f'{manifest}: cannot be read ({error})',)
  found = _measure_all(path, sorted(listed))
  return tuple(
    f'{path / name}: expected {listed[name]}, got {found[name]}'
    for name in found
    if found[name] != listed[name]
  )


def _measure_all(path: pathlib.Path, names: list[str]) -> dict[str, Any]:
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    measured = pool.map(_measure, [path / name for name in names])
    return dict(zip(names, measured, strict=True))


def _measure(file: pathlib.Path) -> dict[str, Any] | str:
  """Returns size in bytes and CRC-32 of a file."""
  crc = size = 0
  try:
    with file.open('rb') as opened:
      while chunk := opened.read(_CHUNK):
        crc = zlib.crc32(chunk, crc)
        size += len(chunk)
  except OSError:
    return 'no readable file'
  return {'crc32': f'{crc:08x}', 'size': size}


def _encode(files: Mapping[str, Any]) -> str:
  body = json.dumps(files, sort_keys=True)
  crc = zlib.crc32(body.encode())
  return json.dumps({'crc32': f'{crc:08x}', 'files': files}, sort_keys=True)


def _part(key: Any) -> str:
  return str(
    getattr(key, 'key', getattr(key, 'name', getattr(key, 'idx', key)))
  )


def _words(entry: list[Any] | None) -> str:
  return 'nothing' if entry is None else f'{entry[0]}{entry[1]}'
