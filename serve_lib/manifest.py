"""Legal values of the manifest of a bundle, which others may have written."""

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax
from annotated_types import Interval, MinLen, Predicate
from jax import export

from core.errors import ConfigError
from core.fields import check
from halting import older
from halting.row_rules import Never, RowRule
from serve_lib.chain import Grid
from serve_lib.decisions import Temperature
from serve_lib.policies import PRUNED, ExitOptions

Count = Annotated[int, Interval(ge=0, le=2**31 - 1)]
Size = Annotated[int, Interval(ge=1, le=2**31 - 1)]
Pixels = Annotated[int, Interval(ge=1, le=8192)]
Sizes = Annotated[tuple[Size, ...], MinLen(1)]


def _is_threshold(value: Any) -> bool:
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  return value is None or (is_number and not math.isnan(value))


Threshold = Annotated[Any, Predicate(_is_threshold), 'a number or None']


@dataclasses.dataclass(frozen=True)
class _Options(ExitOptions):
  thresholds: dict[str, Threshold] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Plain:
  kind: str
  class_names: tuple[str, ...]
  lengths: Sizes
  warnings: tuple[str, ...] = ()
  several: bool = False
  certified: dict[str, str] = dataclasses.field(default_factory=dict)
  temperatures: tuple[Temperature, ...] = ()


@dataclasses.dataclass
class _Exits(_Plain):
  rule: RowRule = dataclasses.field(default_factory=Never)
  options: _Options = dataclasses.field(default_factory=_Options)


@dataclasses.dataclass
class _Images:
  kind: str
  image_size: Pixels
  resize_small: Pixels
  length: Size
  max_pixels: Size = 1


@dataclasses.dataclass
class _Tokens:
  kind: str
  count: Size
  vocab_size: Count
  length: Size


@dataclasses.dataclass
class _Texts:
  kind: str
  max_length: Size
  max_characters: Size = 1
  num_texts: Literal[None, 1, 2] = None
  vocab_size: Count = 0
  padding_tokens: Count = 1
  num_types: Size = 2


@dataclasses.dataclass
class _Drift:
  confidences: tuple[float, ...]
  threshold: Threshold
  during: tuple[float, ...] | None = None


@dataclasses.dataclass
class _Chain:
  num_stages: Size
  variants: Annotated[tuple[str, ...], MinLen(1)]
  heads: tuple[Count, ...] = ()
  limit: Count = 0
  kept_tokens: tuple[Count, ...] = ()


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


_POLICIES = {
  'plain': _Plain, 'halting': _Plain, 'tape': _Plain, 'exits': _Exits
}  # fmt: skip
_READERS = {'images': _Images, 'tokens': _Tokens, 'texts': _Texts}


def check_manifest(given: Any) -> None:
  """Raises ValueError where a value is illegal, or contradicts another one."""
  check(_Manifest, given, 'manifest')
  policy = given['policy']
  if 'rule' in policy:
    is_regression = not policy.get('class_names')
    policy['rule'] = older.row_rule(policy['rule'], is_regression)
  for group, kinds in (('policy', _POLICIES), ('reader', _READERS)):
    part = given[group]
    kind: Any = part.get('kind')
    legal = kinds.get(kind) if isinstance(kind, str) else None
    if legal is None:
      raise ConfigError(f'{group}.kind', kind, f'one of {", ".join(kinds)}')
    check(legal, part, group)
  for source, one in given['drift'].items():
    if one is not None:
      check(_Drift, one, f'drift.{source}')
  for one in given['programs']:
    check(_Program, one, 'programs')
  _check_sizes(given)


def _check_sizes(given: Mapping[str, Any]) -> None:
  """Raises ConfigError where two parts of a manifest are not of one model."""
  policy, chain, reader = (given[k] for k in ('policy', 'chain', 'reader'))
  lengths, stages = given['grid']['lengths'], chain['num_stages']
  longest = reader.get('max_length', reader.get('length'))
  numbers = [number for number, _ in given['variables'].values()]
  read = {number for one in given['programs'] for number in one['read']}
  runs = [one for program in given['programs'] for one in program['runs']]
  parts = {*chain['variants']}, {*lengths}, {*given['grid']['batches']}
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
    ('chain.kept_tokens', len(chain.get('kept_tokens', ())),
     PRUNED not in chain['variants']
     or len(chain['kept_tokens']) >= lengths[-1], 'one for each length'),
    ('chain.heads', chain.get('heads'),
     policy['kind'] != 'exits' or len(chain['heads']) == stages,
     f'one for each of {stages} stages'),
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

  `chain` is a `BundleChain`; `classes` are those of an answer, 0 for a number.
  """
  ends = {
    number for (stage, *_), number in chain.numbers.items()
    if stage == chain.num_stages - 1
  }  # fmt: skip
  sizes = {number: group[-1] for group, number in chain.numbers.items()}
  for number, (read, artifact) in enumerate(chain.programs):
    one = export.deserialize(artifact)
    taken = [(x.shape, x.dtype) for x in one.in_avals]
    given = [chain.variables[n] for n in read]
    if taken[: len(read)] != [(x.shape, x.dtype) for x in given]:
      raise ValueError(f'program_{number}: expected the variables it reads')
    size = sizes.get(number)
    if {shape[:1] for shape, _ in taken[len(read) :]} != {(size,)}:
      raise ValueError(f'program_{number}: expected rows in batches of {size}')
    _, outputs = jax.tree.unflatten(one.out_tree, one.out_avals)
    logits = getattr(outputs.get('logits'), 'shape', None)
    if logits != (size, classes or 1) and (logits or number in ends):
      expected = f'shape {(size, classes or 1)}, got {logits}'
      raise ValueError(f'program_{number}: logits: expected {expected}')
