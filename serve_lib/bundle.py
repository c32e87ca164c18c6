"""One file with all that serves a model: programs, variables and decisions.

    adaptive-bundle 1 <SHA-256 of the rest>
    <a zip archive, not compressed>
      manifest.json          policy, reader, grid; which program runs what
      variables.safetensors  those that programs read
      tokenizer.json         of a model of texts
      program_<number>       StableHLO for `PLATFORMS`, by `jax.export`

`read` gives a `Chain` and a `Policy` without the Python code of the model. The
checksum finds any changed byte, but it is no signature: a file may come from
others. So nothing in it is executed but StableHLO, and a program with a custom
call, which could run any code of the process, is refused.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import pathlib
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax import export

from dataset_lib import tokenizer
from dataset_lib.errors import ConfigError
from serve_lib import items
from serve_lib.chain import Grid, Stage
from serve_lib.decisions import ClassifierPolicy
from serve_lib.exits import Rule
from serve_lib.monitor import DriftCheck, Monitor
from serve_lib.policies import (
  UNPRUNED,
  ExitOptions,
  ExitPolicy,
  HaltingPolicy,
  TapePolicy,
)
from serve_lib.programs import Programs, Traced

Path = str | os.PathLike[str]

MAGIC = b'adaptive-bundle 1 '
PLATFORMS = ('cpu', 'cuda', 'tpu')
MANIFEST, VARIABLES, TOKENIZER = (
  'manifest.json', 'variables.safetensors', 'tokenizer.json'
)  # fmt: skip
# The names of operations are found as they are in MLIR's bytecode, but not
# always in its text, which may have escapes.
_BYTECODE, _CALL = b'ML\xefR', b'custom_call'
POLICIES: Mapping[str, Any] = {
  'plain': ClassifierPolicy,
  'exits': ExitPolicy,
  'halting': HaltingPolicy,
  'tape': TapePolicy,
}
# Fields of policies that are dataclasses, and fields that are not stored so.
_NESTED: Mapping[str, Any] = {'rule': Rule, 'options': ExitOptions}
_BUILT = ('chain', 'reader', 'monitor')
_MEMBER = re.compile(
  rf'{MANIFEST}|{VARIABLES}|{TOKENIZER}|program_\d+'.replace('.', r'\.')
)
_DTYPES = {
  'BOOL': 'bool',
  'F': 'float',
  'BF': 'bfloat',
  'I': 'int',
  'U': 'uint',
}


class BundleError(RuntimeError):
  """A bundle is damaged, or holds what is not executed."""

  exit_code = 6  # of a command, as for checkpoints


@dataclasses.dataclass(eq=False)
class BundleChain:
  """The stages of a bundle as `serve_lib.chain.Chain`."""

  num_stages: int
  variants: tuple[str, ...]
  variables: list[Any]
  pad: Callable[..., Any]
  programs: Sequence[tuple[Sequence[int], bytes]]  # variables read, artifact
  numbers: Mapping[tuple[Any, ...], int]  # of programs by (*group, size)
  heads: tuple[int, ...]  # layers of the stages' ends, for `ExitPolicy`
  limit: int  # iterations, for `HaltingPolicy`
  kept_tokens: Sequence[int]  # of a row of 1, 2, ... tokens, if pruned

  def stage(self, index: int, variant: str, length: int) -> Stage:
    """Returns the function of a stage; see `serve_lib.chain.Chain`."""
    group = index, variant, length
    sizes = {k[-1]: n for k, n in self.numbers.items() if k[:-1] == group}
    return self._stage(tuple(sizes.items()))

  @functools.cache  # noqa: B019  equal stages are one function
  def _stage(self, sizes: tuple[tuple[int, int], ...]) -> Stage:
    def run(variables: Any, carry: Any) -> Any:
      leaves = jax.tree.leaves(carry)
      read, artifact = self.programs[dict(sizes)[len(leaves[0])]]
      return _call(artifact)([variables[number] for number in read], leaves)

    return run

  def kept(self, length: int) -> int:
    """Returns the tokens that the pruned variant keeps of `length`."""
    return self.kept_tokens[length - 1]


def _pure(artifact: bytes) -> bytes:
  """Returns an artifact; raises BundleError if it has a custom call."""
  if _CALL in artifact:
    raise BundleError('a program: expected StableHLO without custom calls')
  return artifact


def _call(artifact: bytes) -> Callable[..., Any]:
  """Returns the function of an artifact, to be compiled."""
  exported = export.deserialize(bytearray(artifact))
  if not exported.mlir_module_serialized.startswith(_BYTECODE):
    raise BundleError('a program: expected the bytecode of StableHLO')
  return exported.call


def write(
  path: Path, programs: Programs, policy: Any, about: Mapping[str, Any]
) -> int:
  """Exports a grid of programs and a policy; returns the number of programs.

  `about` is stored unread, such as the step and the calibration. Raises
  ConfigError for a policy of another kind than `POLICIES`.
  """
  chain: Any = programs.chain
  kind = {cls: name for name, cls in POLICIES.items()}.get(type(policy))
  if kind is None:
    expected = f'a model that is served by one of {", ".join(POLICIES)}'
    raise ConfigError('policy', type(policy).__name__, expected)
  found: dict[Any, dict[str, Any]] = {}
  used: dict[int, Any] = {}
  members: dict[str, bytes] = {}
  for group, size, one in programs.stages():
    leaves, structure = jax.tree.flatten(one.carry)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    if (key := (one.name, structure, shapes)) not in found:
      members[f'program_{len(found)}'] = _export(one)
      found[key] = {'read': one.read, 'runs': []}
      used |= dict(zip(one.read, one.variables, strict=True))
    found[key]['runs'].append((*group, size))
  names = [
    jax.tree_util.keystr(name, simple=True, separator='/')
    for name, _ in jax.tree_util.tree_leaves_with_path(chain.variables)
  ]
  variables = {names[number]: np.asarray(x) for number, x in used.items()}
  places = {number: place for place, number in enumerate(used)}
  for entry in found.values():
    entry['read'] = [places[number] for number in entry['read']]
  manifest = _describe(chain, programs.grid, policy) | {
    'about': dict(about),
    'jax': jax.__version__,
    'variables': list(variables),
    'programs': list(found.values()),
  }
  manifest['policy']['kind'] = kind
  # Python's JSON has infinity, which is a threshold.
  members[MANIFEST] = json.dumps(manifest, indent=1).encode()
  members[VARIABLES] = safetensors.numpy.save(variables)
  if (words := getattr(policy.reader, 'tokenizer', None)) is not None:
    members[TOKENIZER] = words.to_json().encode()
  _write_members(pathlib.Path(path), members)
  return len(found)


def _export(one: Traced) -> bytes:
  """Returns a stage as an artifact from lists of arrays to such and a dict."""
  leaves, structure = jax.tree.flatten(one.carry)

  def run(variables: Any, leaves: Any) -> Any:
    carry = jax.tree.unflatten(structure, leaves)
    carry, outputs = one.function(variables, carry)
    return jax.tree.leaves(carry), dict(outputs)

  shapes = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
    (one.variables, leaves),
  )
  # Without the lines of the call, whose paths are those of this machine.
  name = 'jax_traceback_in_locations_limit'
  before = getattr(jax.config, name)
  jax.config.update(name, 0)
  try:
    exported = export.export(jax.jit(run), platforms=PLATFORMS)(*shapes)
  finally:
    jax.config.update(name, before)
  return _pure(bytes(exported.serialize()))


def _describe(chain: Any, grid: Grid, policy: Any) -> dict[str, Any]:
  """Returns what the host needs to know, as values of JSON."""
  checks = {'': policy.monitor.drift, **policy.monitor.sources}
  has_pruned = UNPRUNED in chain.variants and len(chain.variants) > 1
  lengths = range(1, grid.lengths[-1] + 1) if has_pruned else ()
  return {
    'policy': _policy_fields(policy),
    'reader': dict(policy.reader.recipe),
    'drift': {
      source: one and {
        'confidences': one.confidences.tolist(), 'threshold': one.threshold
      }
      for source, one in checks.items()
    },
    'chain': {
      'num_stages': chain.num_stages,
      'variants': chain.variants,
      'heads': getattr(chain, 'heads', ()),
      'limit': getattr(chain, 'limit', 0),
      'kept_tokens': [chain.kept(length) for length in lengths],
    },
    'grid': dataclasses.asdict(grid),
  }  # fmt: skip


def _policy_fields(policy: Any) -> dict[str, Any]:
  """Returns the fields of a policy as values of JSON."""
  names = [field.name for field in dataclasses.fields(policy)]
  values = {n: getattr(policy, n) for n in names if n not in _BUILT}
  for name, kind in _NESTED.items():
    if name in values:
      parts = [field.name for field in dataclasses.fields(kind)]
      values[name] = {part: getattr(values[name], part) for part in parts}
  return {
    name: value.tolist() if isinstance(value, np.ndarray) else value
    for name, value in values.items()
  }


def _write_members(path: pathlib.Path, members: Mapping[str, bytes]) -> None:
  """Writes the file atomically; equal members give equal bytes."""
  archive = io.BytesIO()
  with zipfile.ZipFile(archive, 'w') as file:
    for name, content in members.items():
      file.writestr(zipfile.ZipInfo(name), content)
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  try:
    temporary.write_bytes(_header(archive.getbuffer()) + archive.getbuffer())
    temporary.replace(path)
  finally:
    temporary.unlink(missing_ok=True)


def _header(content: Any) -> bytes:
  return MAGIC + hashlib.sha256(content).hexdigest().encode() + b'\n'


def read(
  path: Path,
  on_drift: Callable[[bool, dict[str, Any]], None] | None = None,
) -> tuple[BundleChain, Any, Grid]:
  """Returns chain, policy and grid for an `Engine`.

  `on_drift` is called when drift begins or ends. Raises BundleError if a byte
  was changed, or if a program is not pure.
  """
  members = _read_members(pathlib.Path(path))
  with _damage_named(path):
    manifest = json.loads(members[MANIFEST])
    arrays = {
      name: np.frombuffer(one['data'], _dtype(one['dtype'])).reshape(
        one['shape']
      )
      for name, one in safetensors.deserialize(members[VARIABLES])
    }
    recipe = manifest['reader']
    if recipe['kind'] == 'texts':
      words = members.get(TOKENIZER)
      recipe['tokenizer'] = words and tokenizer.from_json(words, TOKENIZER)
    reader = items.KINDS[recipe.pop('kind')](**recipe)
    programs = [
      (one['read'], _pure(members[f'program_{number}']))
      for number, one in enumerate(manifest['programs'])
    ]
    numbers = {
      tuple(run): number
      for number, one in enumerate(manifest['programs'])
      for run in one['runs']
    }
    chain = BundleChain(
      variables=[arrays[name] for name in manifest['variables']],
      pad=reader.pad,
      programs=programs,
      numbers=numbers,
      **{k: _tuples(value) for k, value in manifest['chain'].items()},
    )
    checks: dict[str, Any] = {}
    for source, one in manifest['drift'].items():
      known = one and np.array(one['confidences'], np.float64)
      checks[source] = one and DriftCheck(
        known, one['threshold'], on_drift=on_drift
      )
    monitor = Monitor(drift=checks.pop(''), sources=checks)
    values = {k: _tuples(value) for k, value in manifest['policy'].items()}
    for name in _NESTED.keys() & values.keys():
      values[name] = _NESTED[name](**values[name])
    kind = POLICIES[values.pop('kind')]
    policy = kind(chain, reader, monitor=monitor, **values)
    grid = Grid(**{k: tuple(sizes) for k, sizes in manifest['grid'].items()})
  return chain, policy, grid


def _tuples(value: Any) -> Any:
  return tuple(value) if isinstance(value, list) else value


def _dtype(name: str) -> Any:
  """Returns the dtype of a name of safetensors, such as 'BF16'."""
  letters = name.rstrip('0123456789')
  return jnp.dtype(_DTYPES[letters] + name[len(letters) :])


def _read_members(path: pathlib.Path) -> dict[str, bytes]:
  """Reads the file once, checks all of it, returns its members."""
  try:
    content = path.read_bytes()
  except OSError as error:
    raise BundleError(f'{path}: expected a bundle, got {error}') from error
  head = content[: content.find(b'\n') + 1]
  if not head.startswith(MAGIC):
    expected = 'a file of python -m launch.export --bundle'
    raise BundleError(f'{path}: expected {expected}, got {content[:40]!r}')
  if head != (found := _header(memoryview(content)[len(head) :])):
    digest = head.removeprefix(MAGIC).decode(errors='replace').strip()
    raise BundleError(
      f'{path}: expected the SHA-256 {digest} of its first line, got '
      f'{found.removeprefix(MAGIC).decode().strip()}: the file was changed or '
      'cut off; copy or export it again'
    )
  with _damage_named(path), zipfile.ZipFile(io.BytesIO(content)) as archive:
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    legal = all(map(_MEMBER.fullmatch, names)) and len({*names}) == len(names)
    packed = any(entry.compress_type for entry in entries)
    if not legal or packed or sum(x.file_size for x in entries) > len(content):
      raise ValueError(f'members {names[:4]}')
    return {name: archive.read(name) for name in names}


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
  """Turns the errors of a file that was not written here into one."""
  try:
    yield
  except BundleError as error:
    raise BundleError(f'{path}: {error}') from error
  except Exception as error:  # of zipfile, JSON, flatbuffers, MLIR, the classes
    message = f'expected the content of a bundle, got {error!r}'
    raise BundleError(f'{path}: {message}') from error
