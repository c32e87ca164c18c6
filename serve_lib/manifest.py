"""Legal values of the manifest of a bundle, which others may have written."""

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import Annotated, Any

import jax
from annotated_types import MinLen

from core import registry
from core.errors import ConfigError
from core.fields import check
from halting.row_rules import Limit
from serve_lib.chain import Grid
from serve_lib.decisions import ClassifierPolicy
from serve_lib.items import Count, Size, reader_class
from serve_lib.loops import Loop, at, loop_of

# Fields of a policy that are not stored as they are.
BUILT = 'chain', 'reader', 'monitor'


@dataclasses.dataclass
class _Drift:
  confidences: tuple[float, ...]
  threshold: Limit | None
  during: tuple[float, ...] | None = None


@dataclasses.dataclass
class _Chain:
  num_stages: Size
  variants: Annotated[tuple[str, ...], MinLen(1)]
  loop: Loop | None = None


@dataclasses.dataclass
class _Program:
  read: tuple[Count, ...]
  runs: tuple[tuple[Count, str, Size, Size], ...]


@dataclasses.dataclass
class _Manifest:
  about: dict[str, Any]
  jax: str
  policy: dict[str, Any]
  reader: dict[str, Any]
  drift: dict[str, _Drift | None]
  chain: _Chain
  grid: Grid
  variables: dict[str, tuple[Count, str]]
  programs: tuple[_Program, ...]


def check_manifest(manifest: Any) -> type[ClassifierPolicy]:
  """Returns the class of the policy; raises ValueError for illegal values."""
  check(_Manifest, manifest, 'manifest')
  policy, reader = dict(manifest['policy']), dict(manifest['reader'])
  kind = policy_class(policy.pop('kind', None), 'policy.kind')
  check(kind, policy, 'policy', BUILT)
  read_by = reader_class(reader.pop('kind', None), 'reader.kind')
  check(read_by, reader, 'reader', ('tokenizer',))
  for source, one in manifest['drift'].items():
    if one is not None:
      check(_Drift, one, f'drift.{source}')
  if loop := manifest['chain'].get('loop'):
    check(Loop, loop, 'chain.loop')
  _check_sizes(manifest)
  return kind


def policy_class(name: Any, field: str) -> type[ClassifierPolicy]:
  """Returns the policy 'module:Class' of an installed package."""
  expected = "'module:Class' of a ClassifierPolicy of an installed package"
  return registry.locate(name, field, ClassifierPolicy, expected)


def _check_sizes(manifest: Mapping[str, Any]) -> None:
  """Raises ConfigError where two parts of a manifest are not of one model."""
  policy, chain, reader = (manifest[k] for k in ('policy', 'chain', 'reader'))
  lengths, stages = manifest['grid']['lengths'], chain['num_stages']
  longest = reader.get('max_length', reader.get('length'))
  numbers = [number for number, _ in manifest['variables'].values()]
  read = {number for one in manifest['programs'] for number in one['read']}
  runs = [one for program in manifest['programs'] for one in program['runs']]
  parts = {*chain['variants']}, {*lengths}, {*manifest['grid']['batches']}
  built = {
    run for run in runs
    if run[0] < stages and all(map(operator.contains, parts, run[1:]))
  }  # fmt: skip
  needed = math.prod((stages, *map(len, parts)))
  for field, value, legal, expected in (
    ('policy.lengths', policy['lengths'], policy['lengths'] == lengths,
     f'those of the grid, {lengths}'),
    ('reader.length', longest, longest == lengths[-1]
     or longest <= lengths[-1] * ('max_length' in reader),
     f'{lengths[-1]}, the longest of the grid'),
    ('policy.temperatures', len(policy.get('temperatures', ())),
     len(policy.get('temperatures', ())) in (0, 1, stages),
     f'none, or one for each of {stages} stages'),
    ('policy.certified', policy.get('certified'),
     {*policy.get('certified', {}).values()} <= {*chain['variants']},
     f'variants of the chain, {chain["variants"]}'),
    ('programs.read', sorted(read)[-4:], read <= {*numbers}
     and len({*numbers}) == len(numbers), 'numbers of variables'),
    ('programs.runs', len(built), len(built) == needed,
     'one for each stage, variant, length and batch'),
  ):  # fmt: skip
    if not legal:
      raise ConfigError(field, value, expected)


def check_programs(chain: Any, classes: int) -> None:
  """Raises ValueError unless programs take what they read, and give logits.

  `chain` is a `BundleChain`; `classes`: of an answer, 0 for a number.
  """
  loop, end = loop_of(chain), chain.num_stages - 1
  for (stage, *_, size), number in chain.numbers.items():
    read, one = chain.programs[number]
    taken = [(x.shape, x.dtype) for x in one.in_avals]
    variables = [chain.variables[n] for n in read]
    if taken[: len(read)] != [(x.shape, x.dtype) for x in variables]:
      raise ValueError(f'program_{number}: expected the variables it reads')
    if {shape[:1] for shape, _ in taken[len(read) :]} != {(size,)}:
      raise ValueError(f'program_{number}: expected rows in batches of {size}')
    carry, outputs = jax.tree.unflatten(one.out_tree, one.out_avals)
    carry = [(x.shape, x.dtype) for x in carry]
    if at(loop, stage) and carry != taken[len(read) :]:
      raise ValueError(f'program_{number}: expected a carry as it takes')
    logits = outputs['logits'].shape if 'logits' in outputs else None
    if logits != (size, classes or 1) and (logits or stage == end):
      expected = f'shape {(size, classes or 1)}, got {logits}'
      raise ValueError(f'program_{number}: logits: expected {expected}')
