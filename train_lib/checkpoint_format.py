"""What stands in a checkpoint: arrays by name, a description, a manifest.

    <directory>/<step>/default/        arrays, written by orbax
    <directory>/<step>/checkpoint.json step, extra, metrics, shape and dtype
                                       of every array
    <directory>/<step>/manifest.json   size and crc32 of all these files

A state is stored as nested dictionaries named by its paths, such as
`params/encoder/kernel` or `opt_state/0/mu/encoder/kernel`, so a checkpoint
does not depend on the Python classes that made it.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from train_lib import manifest, strict_json

ITEM = 'default'
DESCRIPTION = 'checkpoint.json'
# orbax writes these after the manifest. They hold no data: a checkpoint is
# read without them.
WRITTEN_LATER = ('_CHECKPOINT_METADATA', 'commit_success.txt')
_MOST_LINES = 20  # of an error message


class CheckpointError(RuntimeError):
  """A checkpoint could not be written, or none can be read."""


class CorruptCheckpointError(CheckpointError):
  """Files are not what was written; the message names them."""


class CheckpointMismatchError(ValueError):
  """The checkpoint holds other arrays than asked for; names their paths."""


class CheckpointWarning(UserWarning):
  """A damaged checkpoint was passed over."""


def flatten(tree: Any, prefix: str = '') -> dict[str, Any]:
  """The leaves of a pytree by name; None and empty containers have none.

  Raises:
    TypeError: if a leaf is no array, or an array of typed PRNG keys.
  """
  flat = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = prefix + '/'.join(map(_part, path))
    if not hasattr(leaf, 'dtype') or not hasattr(leaf, 'shape'):
      raise TypeError(
        f'{name}: expected an array, got {type(leaf).__name__}; put values '
        'that are no arrays into `extra`'
      )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      raise TypeError(
        f'{name}: expected a plain array, got typed PRNG keys; store '
        'jax.random.key_data of them'
      )
    flat[name] = leaf
  return flat


def nest(flat: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Nested dictionaries of the leaves whose name starts with a prefix."""
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
  """Dtype and shape by name, as it is stored in the description."""
  return {
    name: [str(leaf.dtype), list(leaf.shape)] for name, leaf in flat.items()
  }


def check_layout(
  where: object, saved: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
  """Compares two layouts.

  Raises:
    CheckpointMismatchError: if a name is only in one of them, or a shape or
      dtype differs; nothing is ever cast.
  """
  lines = [
    f'{name}: expected {_words(wanted.get(name))}, got '
    f'{_words(saved.get(name))}'
    for name in sorted(saved.keys() | wanted.keys())
    if saved.get(name) != wanted.get(name)
  ]
  if lines:
    raise CheckpointMismatchError(
      f'{where} does not hold what this model needs:\n  '
      + shortened(lines)
      + '\nUse the configuration it was written with, or a warm start with '
      'explicit renames.'
    )


def shortened(lines: list[str]) -> str:
  """The lines as a paragraph, cut where nobody reads on."""
  more = len(lines) - _MOST_LINES
  cut = [*lines[:_MOST_LINES], *([f'and {more} more'] if more > 0 else [])]
  return '\n  '.join(cut)


def read_description(step_directory: pathlib.Path) -> dict[str, Any]:
  """Reads `checkpoint.json`: step, extra, metrics, best, arrays."""
  return strict_json.loads((step_directory / DESCRIPTION).read_text())


def read_arrays(
  step_directory: pathlib.Path, wanted: Mapping[str, Any]
) -> dict[str, Any]:
  """Reads the named arrays and nothing else.

  Args:
    step_directory: a checkpoint whose layout has been checked.
    wanted: by name, what has a shape, a dtype and maybe a sharding.

  Returns:
    By name, an array with that sharding, or a NumPy array without one.
  """
  if not wanted:
    return {}
  structure = {name: jax.ShapeDtypeStruct(x.shape, x.dtype)
               for name, x in wanted.items()}  # fmt: skip
  arguments = {name: _restore_argument(leaf) for name, leaf in wanted.items()}
  with ocp.PyTreeCheckpointer() as checkpointer:
    nested = checkpointer.restore(
      step_directory / ITEM,
      args=ocp.args.PyTreeRestore(
        nest(structure), restore_args=nest(arguments), partial_restore=True
      ),
    )
  return flatten(nested)


def verify(step_directory: pathlib.Path) -> tuple[str, ...]:
  """One line per damaged file of a checkpoint."""
  return manifest.verify(step_directory)


def finish(step_directory: pathlib.Path, description: dict[str, Any]) -> None:
  """Adds description and manifest to a directory of arrays."""
  path = step_directory / DESCRIPTION
  path.write_text(strict_json.dumps(description))
  manifest.write(step_directory, exclude=WRITTEN_LATER)


def steps_in(directory: pathlib.Path) -> list[int]:
  """The steps that have a complete checkpoint, ascending."""
  if not directory.is_dir():
    return []
  return sorted(
    int(path.name) for path in directory.iterdir() if path.name.isdecimal()
  )


def _restore_argument(leaf: Any) -> ocp.RestoreArgs:
  where = getattr(leaf, 'sharding', None)
  if where is None:
    return ocp.RestoreArgs(restore_type=np.ndarray)
  return ocp.ArrayRestoreArgs(
    sharding=where, global_shape=leaf.shape, dtype=leaf.dtype
  )


def _part(key: Any) -> str:
  return str(
    getattr(key, 'key', getattr(key, 'name', getattr(key, 'idx', key)))
  )


def _words(entry: list[Any] | None) -> str:
  return 'nothing' if entry is None else f'{entry[0]}{entry[1]}'
