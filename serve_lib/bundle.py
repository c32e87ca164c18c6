"""One file with all that serves a model: programs, variables and decisions.

    adaptive-bundle 2 <SHA-256 of the rest>
    <arrays as of safetensors>
      manifest.json       policy, reader, grid; which program runs what
      tokenizer.json      of a model of texts
      program_<number>    StableHLO for `PLATFORMS`, by `jax.export`
      variables/<name>    those that programs read

`read` gives a `Chain` and a `Policy`, whose class is of an installed package,
without the Python code of the model. The checksum finds any changed byte, but
is no signature. So nothing is executed but StableHLO, and a program with a
custom call, which could run any code of the process, is refused.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax import export

from core import files, registry
from core.errors import BadRecord, UserError
from dataset_lib import contract, tokenizer
from halting.rule import HaltingRule
from serve_lib import items
from serve_lib import manifest as manifests
from serve_lib.chain import Grid, Stage
from serve_lib.loops import Loop, loop_of
from serve_lib.monitor import OnDrift, monitor_of
from serve_lib.programs import Programs, Traced

Path = str | os.PathLike[str]

MAGIC = b'adaptive-bundle 2 '
PLATFORMS = ('cpu', 'cuda', 'tpu')
DRIFT = 'confidences', 'threshold', 'during'  # of a `DriftCheck`
MANIFEST, TOKENIZER = 'manifest.json', 'tokenizer.json'
# MLIR's bytecode has the names of operations; its text may escape them.
_BYTECODE, _CALL = b'ML\xefR', b'custom_call'


class BundleError(UserError, RuntimeError):
  """A bundle is damaged, or holds what is not executed."""

  exit_code = 6  # of a command, as for checkpoints


@dataclasses.dataclass(eq=False)
class BundleChain:
  """The stages of a bundle as `serve_lib.chain.Chain`."""

  num_stages: int
  variants: tuple[str, ...]
  variables: Mapping[int, Any]
  pad: Callable[..., Any]
  # Variables that each reads, and what `export.deserialize` returns.
  programs: Sequence[tuple[Sequence[int], Any]]
  numbers: Mapping[tuple[Any, ...], int]  # of programs by (*group, size)
  loop: Loop | None = None  # whose program is that of a whole visit

  def stage(self, index: int, variant: str, length: int) -> Stage:
    """Returns the function of a stage; see `serve_lib.chain.Chain`."""
    group = index, variant, length
    sizes = {k[-1]: n for k, n in self.numbers.items() if k[:-1] == group}
    return self._stage(tuple(sizes.items()))

  @functools.cache  # noqa: B019  equal stages are one function
  def _stage(self, sizes: tuple[tuple[int, int], ...]) -> Stage:
    def run(variables: Any, carry: Any) -> Any:
      leaves = jax.tree.leaves(carry)
      read, exported = self.programs[dict(sizes)[len(leaves[0])]]
      try:
        return exported.call([variables[number] for number in read], leaves)
      except (TypeError, ValueError, KeyError) as error:
        raise BundleError(f'a program: expected its arrays, {error}') from error

    return run


def write(
  path: Path, programs: Programs, policy: Any, about: Mapping[str, Any]
) -> int:
  """Exports a grid of programs and a policy; returns the number of programs.

  `about` is stored unread, such as the step and the calibration. Raises
  ConfigError unless policy and reader are of an installed package.
  """
  chain: Any = programs.chain
  kind = registry.name_of(type(policy))
  manifests.policy_class(kind, 'policy')
  items.reader_class(policy.reader.recipe['kind'], 'reader')
  names = [
    jax.tree_util.keystr(name, simple=True, separator='/')
    for name, _ in jax.tree_util.tree_leaves_with_path(chain.variables)
  ]
  table: dict[Any, dict[str, Any]] = {}
  used: dict[int, Any] = {}
  texts: dict[str, bytes | bytearray] = {}
  for group, size, one in programs.stages():
    leaves, structure = jax.tree.flatten(one.carry)
    if (key := (one.name, structure, *leaves)) not in table:
      texts[f'program_{len(table)}'] = _export(one)
      table[key] = {'read': one.read, 'runs': []}
      used |= dict(zip(one.read, one.variables, strict=True))
    table[key]['runs'].append((*group, size))
  manifest = _describe(chain, programs.grid, policy) | {
    'about': dict(about),
    'jax': jax.__version__,
    'variables': {names[n]: (n, x.dtype.name) for n, x in used.items()},
    'programs': list(table.values()),
  }
  manifest['policy']['kind'] = kind
  # Python's JSON has infinity, which is a threshold.
  text = json.dumps(manifest, indent=1, default=_plain)
  texts[MANIFEST] = text.encode()
  if isinstance(policy.reader, items.TextReader) and policy.reader.tokenizer:
    texts[TOKENIZER] = policy.reader.tokenizer.to_json().encode()
  arrays = {f'variables/{names[n]}': np.asarray(x) for n, x in used.items()}
  arrays |= {k: np.frombuffer(text, np.uint8) for k, text in texts.items()}
  _write(path, arrays)
  return len(table)


def _export(one: Traced) -> bytearray:
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
  # Without the lines of the call, which have paths of this machine.
  name = 'jax_traceback_in_locations_limit'
  before = getattr(jax.config, name)
  jax.config.update(name, 0)
  try:
    exported = export.export(jax.jit(run), platforms=PLATFORMS)(*shapes)
  finally:
    jax.config.update(name, before)
  artifact = exported.serialize()
  _load(artifact)
  return artifact


def _load(artifact: Any) -> export.Exported:
  """Reads a program; raises BundleError if it could call other code."""
  if _CALL not in artifact:
    exported = export.deserialize(artifact)
    if exported.mlir_module_serialized.startswith(_BYTECODE):
      return exported
  expected = 'the bytecode of StableHLO without custom calls'
  raise BundleError(f'a program: expected {expected}')


def _describe(chain: Any, grid: Grid, policy: Any) -> dict[str, Any]:
  """Returns what the host needs to know."""
  loop = loop_of(chain)
  checks = {'': policy.monitor.drift, **policy.monitor.sources}
  names = [field.name for field in dataclasses.fields(policy)]
  stored = [name for name in names if name not in manifests.BUILT]
  return {
    'policy': {name: getattr(policy, name) for name in stored},
    'reader': policy.reader.recipe,
    'drift': {
      source: one and {name: getattr(one, name) for name in DRIFT}
      for source, one in checks.items()
    },
    'chain': {
      'num_stages': chain.num_stages,
      'variants': chain.variants,
      'loop': loop and Loop(loop.stage, loop.visits),
    },
    'grid': grid,
  }  # fmt: skip


def _plain(value: Any) -> Any:
  """Returns an array as a list, or a dataclass's fields, and a rule's class."""
  if isinstance(value, np.ndarray):
    return value.tolist()
  if isinstance(value, HaltingRule):
    return registry.described(value)
  return dataclasses.asdict(value)


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes the file; equal arrays give equal bytes."""
  content = safetensors.numpy.save({**arrays})
  files.write_bytes(path, _header(content) + content)


def _header(content: bytes) -> bytes:
  return MAGIC + hashlib.sha256(content).hexdigest().encode() + b'\n'


def read(
  path: Path, on_drift: OnDrift | None = None
) -> tuple[BundleChain, Any, Grid]:
  """Returns chain, policy and grid for an `Engine`.

  `on_drift` is called when drift begins or ends. Raises BundleError if a byte
  was changed, or if a program is not pure.
  """
  try:
    # Read once: it may change meanwhile.
    with files.opened(path, files.MAX_WEIGHTS) as file:
      head = file.readline(99)
      content = _arrays(file) if head.startswith(MAGIC) else b''
  except (OSError, BadRecord) as error:
    raise BundleError(f'{path}: expected a bundle, got {error}') from error
  if not head.startswith(MAGIC):
    expected = 'a file of python -m launch.export --bundle of this version'
    if head.startswith(MAGIC.split()[0]):
      expected += ': export the run again'
    raise BundleError(f'{path}: expected {expected}, got {head[:40]!r}')
  if head != (actual := _header(content)):
    raise BundleError(
      f'{path}: expected content with the header {head!r}, got {actual!r}: the '
      'file was changed or cut off; copy or export it again'
    )
  try:
    return _build(dict(safetensors.deserialize(content)), on_drift)
  except BundleError as error:
    raise BundleError(f'{path}: {error}') from error
  except Exception as error:  # of safetensors, JSON, the classes
    got = error if isinstance(error, UserError) else repr(error)
    message = f'expected the content of a bundle, got {got}'
    raise BundleError(f'{path}: {message}') from error


def _arrays(file: BinaryIO) -> bytes:
  """Reads the arrays; nothing if they do not state the size of the file."""
  start, size = file.tell(), os.fstat(file.fileno()).st_size
  length = int.from_bytes(file.read(8), 'little')
  try:
    stated = json.loads(file.read(min(length, files.MAX_BYTES)))
    end = max(one['data_offsets'][1] for one in stated.values())
  except files.DAMAGE:
    return b''
  if start + 8 + length + end != size:
    return b''
  file.seek(start)
  return file.read(size - start)


def _check_contract(manifest: Mapping[str, Any], recipe: Any) -> None:
  """Raises ValueError if items are not read as in the run."""
  run = manifest['about'].get('contract', {})  # {}: without a contract
  prepared = run.get('preprocessing', {})
  vocabulary, names = recipe.get('tokenizer'), run.get('class_names')
  values = {**recipe, **(vocabulary.preprocessing(0) if vocabulary else {})}
  for name in ('image_size', 'resize_small', *contract.TOKENS):
    if values.get(name) and prepared.get(name, values[name]) != values[name]:
      got = f'{prepared[name]}, got {values[name]}'
      raise ValueError(f'{name}: expected that of the run, {got}')
  if names and manifest['policy'].get('class_names', names) != names:
    raise ValueError('class_names: expected those of the run')
  policy, kind = manifest['policy'], run.get('label_kind', '')
  if kind and policy.get('several', False) != (kind == 'classes'):
    raise ValueError(f'several: expected that of the run, whose labels: {kind}')
  count = len(policy['class_names'])
  if count and run.get('num_classes', count) != count:
    raise ValueError(f'class_names: expected {run["num_classes"]}, got {count}')


def _build(arrays: dict[str, Any], on_drift: OnDrift | None) -> Any:
  """Builds what `read` returns; the arrays have 'data' and 'shape'."""
  manifest = json.loads(arrays.pop(MANIFEST)['data'])
  manifest = files.with_tuples(manifest)
  kind = manifests.check_manifest(manifest)
  recipe = manifest['reader']
  if recipe['kind'] == 'texts':
    vocabulary = arrays.pop(TOKENIZER, None)
    recipe['tokenizer'] = vocabulary and tokenizer.from_json(
      bytes(vocabulary['data']), TOKENIZER
    )
  _check_contract(manifest, recipe)
  read_by = items.reader_class(recipe.pop('kind'), 'reader.kind')
  reader = registry.build(read_by, recipe)
  programs, numbers = [], dict[Any, int]()
  for number, one in enumerate(manifest['programs']):
    artifact = arrays.pop(f'program_{number}')['data']
    programs.append((one['read'], _load(artifact)))
    numbers |= dict.fromkeys(one['runs'], number)
  variables = {}
  for name, (number, dtype) in manifest['variables'].items():
    stored = arrays.pop(f'variables/{name}')
    array = np.frombuffer(stored['data'], jnp.dtype(dtype))
    variables[number] = array.reshape(stored['shape'])
  if arrays:
    raise ValueError(f'unknown arrays {[*arrays][:4]}')
  built: Any = dict(variables=variables, programs=programs, numbers=numbers)
  if loop := manifest['chain'].get('loop'):
    built['loop'] = Loop(**loop)
  chain = BundleChain(pad=reader.pad, **manifest['chain'] | built)
  values = manifest['policy']
  values.setdefault('about', {'step': manifest['about'].get('step')})
  del values['kind']
  monitor = monitor_of(manifest['drift'], on_drift)
  parts = dict(chain=chain, reader=reader, monitor=monitor)
  policy: Any = registry.build(kind, values, **parts)
  manifests.check_programs(chain, len(policy.class_names))
  return chain, policy, Grid(**manifest['grid'])
