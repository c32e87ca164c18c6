"""The files of a checkpoint: named arrays and a manifest.

    <directory>/<step>/              arrays, written by orbax
    <directory>/<step>/manifest.json the fields of `Saved`

Arrays are named by their paths, such as `opt_state/0/mu/encoder/kernel`. orbax,
which only this file calls, by its API of version 0, does not detect corrupted
bytes: `find` verifies size and CRC-32 of all files before they are read.
"""

import concurrent.futures
import contextlib
import dataclasses
import math
import pathlib
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util
from jax.experimental import multihost_utils

from core import fields, files
from core.errors import UserError
from train_lib.run_directory import CHECKPOINTS, MANIFEST, Path, steps_in

TEMPORARY = '.orbax-checkpoint-tmp'  # ends the name of a folder in writing
# orbax writes these after the manifest. Restoring does not need them.
WRITTEN_LATER = ('_CHECKPOINT_METADATA', 'commit_success.txt')
# orbax's list of the arrays, and the database of the arrays of all processes,
# which a folder whose name is a pattern of `glob` lacks without an error.
NEEDED = '_METADATA', 'manifest.ocdbt'
_CHUNK = 1 << 20  # bytes
_THREADS = 4  # zlib and reading both release the interpreter lock


class CheckpointError(UserError, RuntimeError):
  """A checkpoint could not be written, or none can be read."""

  exit_code = 6


class CorruptCheckpointError(CheckpointError):
  """Files differ from those written; the message names them."""


class CheckpointMismatchError(UserError, ValueError):
  """The checkpoint holds other arrays than asked for; names their paths."""

  exit_code = 6


@dataclasses.dataclass(frozen=True)
class Saved:
  """A complete checkpoint: its folder, and the content of its manifest."""

  path: pathlib.Path
  step: int
  extra: dict[str, Any]
  metrics: dict[str, files.Number]
  best: dict[str, str]  # `metric` and `mode` of the best checkpoint
  arrays: dict[str, Sequence[Any]]  # dtype and shape by name
  files: dict[str, dict[str, Any]]  # size and CRC-32 by name

  def read(self, prefix: str = '', abstract: Any = None) -> Any:
    """Reads the arrays whose name starts with a prefix.

    `abstract` is their structure; leaves without a sharding become NumPy
    arrays, and None gives nested dictionaries of them. Raises
    CheckpointMismatchError for other arrays.
    """
    saved = {n: x for n, x in self.arrays.items() if n.startswith(prefix)}
    if abstract is None:
      leaves = {
        name.removeprefix(prefix): jax.ShapeDtypeStruct(shape, dtype)
        for name, (dtype, shape) in saved.items()
      }
      abstract = nest(leaves)
    wanted = flatten(abstract, prefix)
    check_layout(self.path, saved, layout(wanted))
    if not wanted:
      return abstract
    tree = nest(wanted)
    arguments = ocp.checkpoint_utils.construct_restore_args(tree)
    options = ocp.args.PyTreeRestore(tree, arguments, partial_restore=True)
    try:
      with ocp.PyTreeCheckpointer() as checkpointer:
        restored = flatten(checkpointer.restore(self.path, args=options))
    except Exception as error:  # TensorStore's, orbax's
      reason = str(error.__cause__ or error)[:200]
      message = f'{self.path} cannot be read: {reason}'
      raise CheckpointError(message) from error
    check_layout(self.path, saved, layout(restored))  # another was signed
    structure = jax.tree.structure(abstract)
    return jax.tree.unflatten(structure, [restored[name] for name in wanted])

  def params(self, abstract: Any = None) -> Any:
    """Reads the parameters; their average unless the run kept none."""
    kept = any(name.startswith('ema_params/') for name in self.arrays)
    return self.read('ema_params/' if kept else 'params/', abstract)


class Writer(ocp.AsyncCheckpointer):
  """Writes arrays in the background; `finish()` is called before the rename."""

  def __init__(self, finish: Callable[[], None]):
    options = ocp.options.AsyncOptions(
      post_finalization_callback=finish,
      # A full disk then raises in the call that hits it.
      create_directories_asynchronously=False,
    )
    # Of its default, a write may follow the removal of a failed save.
    metadata = ocp.metadata.metadata_store(
      enable_write=True, blocking_write=True
    )
    super().__init__(
      ocp.StandardCheckpointHandler(),
      async_options=options,
      checkpoint_metadata_store=metadata,
    )

  def write(self, path: pathlib.Path, flat: Mapping[str, Any]) -> None:
    """Starts to write named arrays."""
    self.save(path, args=ocp.args.StandardSave(nest(flat)))


def find(directory: Path, step: int | str | None = None) -> Saved:
  """Returns the newest undamaged checkpoint, or that of a step or 'best'.

  `directory` is that of a run, or of its checkpoints; None and 'latest' are the
  newest. Warns of each damaged file of newer steps. Raises CheckpointError
  without such a checkpoint, CorruptCheckpointError if it, or all, are damaged.
  """
  root = pathlib.Path(directory).absolute()
  root = root / CHECKPOINTS if (root / CHECKPOINTS).is_dir() else root
  steps = steps_in(root)
  wanted = best_step(root) if step == 'best' else step
  newest = step in (None, 'latest')
  candidates = steps[::-1] if newest else [s for s in steps if s == wanted]
  if not candidates:
    name = '' if newest else f' of step {step}'
    message = f'{root} has no checkpoint{name}'
    message += f'; it has {steps}' if steps else ''
    if step == 'best':
      message += '; set checkpoint.best_metric in the run, or give a step'
    raise CheckpointError(message)
  chosen, damaged = -1, []
  # One process verifies for all.
  for step in candidates if jax.process_index() == 0 else []:
    problems = verify(root / str(step))
    if not problems:
      chosen = step
      break
    damaged += problems
  if jax.process_count() > 1:
    chosen = int(multihost_utils.broadcast_one_to_all(np.int32(chosen)))
  lines = files.printable(shortened(damaged))
  if chosen < 0:
    what = f'no good checkpoint among steps {candidates} of {root}'
    raise CorruptCheckpointError(f'{what}:\n  {lines}')
  if damaged:
    message = f'DAMAGED CHECKPOINT, going back to step {chosen}:\n  {lines}'
    warnings.warn(message, stacklevel=3)
  return _describe(root / str(chosen))


def _describe(path: pathlib.Path) -> Saved:
  text = files.read_bytes(path / MANIFEST)
  content = files.parse(text)['content']
  # Re-encode to detect any change of the file, even of white space.
  if text.decode() != _encode(content):
    raise ValueError('differs from the one written')
  if content['step'] != int(path.name):
    raise ValueError(f'is that of step {content["step"]}')
  fields.check(Saved, content, '', without=('path',))
  for dtype, shape in content['arrays'].values():
    # Raises here what `Saved.read` would raise later.
    np.broadcast_shapes(tuple(shape))
    jnp.dtype(dtype)
  return Saved(path, **content)


def best_step(root: pathlib.Path) -> int | None:
  """Returns the first best finite step, by the newest manifest's metric."""
  readable: list[Saved] = []
  for step in steps_in(root):
    with contextlib.suppress(*files.DAMAGE):  # which `find` reports
      readable.append(_describe(root / str(step)))
  rule = readable[-1].best if readable else {}
  name = rule.get('metric', '')
  values = {s.step: float(s.metrics.get(name, 'nan')) for s in readable}
  finite = [step for step, value in values.items() if math.isfinite(value)]
  choose = min if rule.get('mode') == 'min' else max
  return choose(finite, key=values.__getitem__, default=None)


def flatten(tree: Any, prefix: str = '') -> dict[str, Any]:
  """Returns the leaves of a pytree by name; raises TypeError if not arrays."""
  flat = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = prefix + jax.tree_util.keystr(path, simple=True, separator='/')
    dtype = getattr(leaf, 'dtype', None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.prng_key):
      raise TypeError(
        f'{name}: expected an array, got {dtype or type(leaf).__name__}; pass '
        'other values as `extra`, and jax.random.key_data of PRNG keys'
      )
    flat[name] = leaf
  return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the nested dictionaries of named leaves."""
  return traverse_util.unflatten_dict(dict(flat), sep='/')


def layout(flat: Mapping[str, Any]) -> dict[str, list[Any]]:
  """Returns dtype and shape by name, as the manifest stores them."""
  return {name: [str(x.dtype), list(x.shape)] for name, x in flat.items()}


def check_layout(
  where: object, saved: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
  """Raises `CheckpointMismatchError` if names, shapes or dtypes differ."""
  lines, none = [], ('nothing', '')
  for name in sorted(saved.keys() | wanted.keys()):
    expected, got = wanted.get(name, none), saved.get(name, none)
    if expected != got:
      lines.append('{}: expected {}{}, got {}{}'.format(name, *expected, *got))
  if lines:
    raise CheckpointMismatchError(
      f'{where} does not hold the arrays of this model:\n  '
      + shortened(lines)
      + '\nUse the configuration it was written with, or a warm start with '
      'warm_start.renames=("old->new",) or warm_start.skip=("regex",).'
    )


def shortened(lines: list[str]) -> str:
  """Joins at most 20 lines, and counts the rest."""
  rest = [f'and {len(lines) - 20} more'] if len(lines) > 20 else []
  return '\n  '.join(lines[:20] + rest)


def finish(path: pathlib.Path, description: Mapping[str, Any]) -> None:
  """Writes the manifest before the commit; ValueError if it lacks `NEEDED`."""
  content = {**description, 'files': _measure_all(path)}
  _check_needed(content['files'])
  (path / MANIFEST).write_text(_encode(content), encoding='utf-8')


def amend(path: pathlib.Path, **changes: Any) -> None:
  """Changes fields of a manifest, atomically."""
  content = vars(_describe(path)) | changes
  del content['path']
  files.write_text(path / MANIFEST, _encode(content))


def _encode(content: Mapping[str, Any]) -> str:
  """Returns the text of a manifest, with a CRC-32 of its own."""
  text = files.dumps(content)
  return f'{{"crc32": "{zlib.crc32(text.encode()):08x}", "content": {text}}}'


def verify(path: pathlib.Path) -> list[str]:
  """Returns a line for each file that differs from the manifest."""
  try:
    listed, measured = _describe(path).files, _measure_all(path)
    _check_needed(listed)
  except files.DAMAGE as error:
    return [f'{path / MANIFEST}: {error}']
  return [
    f'{path / name}: expected {entry}, got {measured.get(name, "no such file")}'
    for name, entry in listed.items()
    if measured.get(name) != entry
  ]


def _check_needed(paths: Mapping[str, Any]) -> None:
  for name in NEEDED:
    if name not in paths:
      raise ValueError(f'does not list {name}, without which nothing is read')


def _measure_all(path: pathlib.Path) -> dict[str, Any]:
  """Returns size in bytes and CRC-32 of the files of a checkpoint by name."""
  later = (MANIFEST, *WRITTEN_LATER)
  paths = [f for f in path.rglob('*') if f.is_file() and f.name not in later]
  names = [file.relative_to(path).as_posix() for file in paths]
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    return dict(zip(names, pool.map(_measure, paths), strict=True))


def _measure(path: pathlib.Path) -> dict[str, Any]:
  crc = 0
  with path.open('rb') as file:
    while chunk := file.read(_CHUNK):
      crc = zlib.crc32(chunk, crc)
    return {'crc32': f'{crc:08x}', 'size': file.tell()}
