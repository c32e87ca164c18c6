"""Annotated fields: legal values pass, others name field and legal range."""

import dataclasses
import math
import pickle
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import flax.linen as nn
import ml_collections
import numpy as np
import pytest
from annotated_types import Ge, Gt, Interval, Len, MinLen, Predicate

from core import fields
from core.errors import ConfigError
from core.fields import Unread

Size = Annotated[int, Interval(ge=1, le=8)]


@dataclasses.dataclass(frozen=True)
class Rate:
  name: Literal['constant', 'linear'] = 'constant'
  lr: Annotated[float, Interval(gt=0.0, le=1.0)] = 0.1


@dataclasses.dataclass(frozen=True)
class Data:
  size: Size
  rate: Rate
  share: Annotated[float, Interval(ge=0.0, le=1.0)] = 0.5
  root: str = ''
  split: Annotated[str, MinLen(1)] = 'train'
  lower: Annotated[str, Predicate(str.islower), 'lower case'] = 'a'
  augment: Annotated[tuple[Literal['crop', 'flip'], ...], fields.Distinct] = ()
  layers: Sequence[Size] = ()
  pair: tuple[float, float] = (0.0, 1.0)
  few: Annotated[tuple[int, ...], Len(0, 2)] = ()
  depth: Annotated[int, Ge(1)] | None = None
  bound: int | float = 2
  count: Annotated[int, Ge(0)] = 0
  flag: bool = False
  stages: dict[str, Rate] = dataclasses.field(default_factory=dict)
  knobs: dict[str, Any] = dataclasses.field(default_factory=dict)
  model: dict = dataclasses.field(default_factory=dict)


class Module(nn.Module):
  num_classes: int
  depth: Annotated[int, Interval(ge=1, le=1000)]
  dtype: Any = None
  layers: Sequence[Annotated[int, Gt(0)]] = ()


def check(**given):
  return fields.check(Data, {'size': 1, **given}, 'dataset')


def test_defaults_complete_the_configuration():
  assert check() == dataclasses.asdict(Data(1, Rate()))


@pytest.mark.parametrize(
  ('name', 'given', 'complete'),
  [
    ('size', np.int64(8), np.int64(8)),
    ('share', 1, 1.0),
    ('augment', ['flip', 'crop'], ('flip', 'crop')),
    ('layers', [1, 2], (1, 2)),
    ('depth', 3, 3),
    ('depth', None, None),
    ('bound', 0.5, 0.5),
    ('count', 2**63 - 1, 2**63 - 1),
    ('rate', {'lr': 1.0}, {'name': 'constant', 'lr': 1.0}),
    ('stages', {'one': {}}, {'one': {'name': 'constant', 'lr': 0.1}}),
    ('knobs', {'x': ('linear', 0, 1)}, {'x': ('linear', 0, 1)}),
    # Texts of a command line.
    ('size', Unread('8'), 8),
    ('size', Unread('8e0'), 8),
    ('share', Unread('1'), 1.0),
    ('root', Unread('12'), '12'),
    ('root', Unread(''), ''),
    ('augment', Unread('flip,crop'), ('flip', 'crop')),
    ('augment', Unread('flip'), ('flip',)),
    ('augment', Unread(''), ()),
    ('layers', Unread('3'), (3,)),
    ('layers', Unread('[3, 4]'), (3, 4)),
    ('depth', Unread('None'), None),
    ('flag', Unread('true'), True),
    ('flag', Unread('0'), False),
    ('rate', {'lr': Unread('1e-2')}, {'name': 'constant', 'lr': 0.01}),
    ('knobs', {'x': Unread("('linear', 0, 1)")}, {'x': ('linear', 0, 1)}),
    ('knobs', Unread("{'x': 1}"), {'x': 1}),
    # Read when the class of the group is known.
    ('model', {'root': Unread('12')}, {'root': '12'}),
  ],
)
def test_a_legal_value_passes_and_lists_become_tuples(name, given, complete):
  found = check(**{name: given})[name]
  assert (found, type(found)) == (complete, type(complete))
  config = ml_collections.ConfigDict({'size': 1, name: given})
  assert fields.check(Data, config, 'dataset')[name] == complete


INTEGER = 'an integer in [1, 8]'
SHARE = 'a number in [0.0, 1.0]'
NAMES = 'a tuple, each one of crop, flip, all distinct'


@pytest.mark.parametrize(
  ('name', 'given', 'expected'),
  [
    *[('size', bad, INTEGER) for bad in (0, 9, 3.0, '3', True, None)],
    *[('share', bad, SHARE) for bad in (-0.1, 1.1, math.nan, math.inf, '1')],
    ('root', 3, 'a string'),
    ('split', '', 'a string, not empty'),
    ('lower', 'A', 'lower case'),
    *[
      ('augment', bad, NAMES)
      for bad in ('flip', ('flop',), ('flip', 'flip'), (3,), ([],))
    ],
    ('layers', (1, 9), 'a tuple, each an integer in [1, 8]'),
    ('pair', (1.0, 2.0, 3.0), 'a tuple of 2, each a number'),
    ('few', (1, 2, 3), 'a tuple, each an integer, at most 2 of them'),
    ('depth', 0, 'an integer >= 1 or None'),
    *[('bound', bad, 'a number') for bad in ('x', 10**400)],
    *[('count', bad, 'an integer >= 0') for bad in (2**63, 10**400, -(10**9))],
    ('flag', 1, 'True or False'),
    *[(name, 3, 'a group of fields') for name in ('rate', 'stages', 'knobs')],
  ],
)
def test_an_illegal_value_names_field_and_range(name, given, expected):
  with pytest.raises(ConfigError) as error:
    check(**{name: given})
  assert str(error.value) == (
    f'dataset.{name}: expected {expected}, got {given!r}'
  )
  assert error.value.field == f'dataset.{name}'
  assert error.value.expected == expected


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    ({'augmnet': ()}, r"dataset.augmnet: .*did you mean 'augment'"),
    ({'rate': {'lr': 0}}, r'dataset.rate.lr: .*in \(0\.0, 1.0\], got 0'),
    ({'rate': {'nmae': ''}}, r"dataset.rate.nmae: .*did you mean 'name'"),
    ({'stages': {'a': {'name': 'x'}}}, 'dataset.stages.a.name: .*one of const'),
    ({'size': Unread('9')}, 'got 9$'),
    ({'share': Unread('half')}, "a number in .*, got 'half'"),
  ],
)
def test_names_and_nested_fields_have_their_path(given, message):
  with pytest.raises(ConfigError, match=message):
    check(**given)


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    ({}, 'model.depth: expected an integer in .*, got .nothing'),
    ({'depth': 0}, r'model.depth: expected an integer in \[1, 1000\], got 0'),
    ({'depth': 1, 'name': 'x'}, 'legal fields are depth, layers'),
    ({'depth': 1, 'layers': (0,)}, 'a tuple, each an integer > 0'),
  ],
)
def test_a_linen_module_has_its_own_fields_only(given, message):
  without = ('num_classes', 'dtype')
  complete = fields.check(Module, {'depth': 2}, 'model', without)
  assert complete == {'depth': 2, 'layers': ()}
  with pytest.raises(ConfigError, match=message):
    fields.check(Module, given, 'model', without)


@dataclasses.dataclass
class Child:
  parent: str
  name: str = ''


def test_other_classes_keep_fields_named_like_those_of_linen():
  assert fields.check(Child, {'parent': 'a'}, '') == {'parent': 'a', 'name': ''}


def test_errors_get_a_prefix_and_survive_pickling():
  error = ConfigError('depth', 0, '1')
  with pytest.raises(ConfigError) as raised, fields.errors_under('model'):
    raise pickle.loads(pickle.dumps(error))
  assert str(raised.value) == 'model.depth: expected 1, got 0'
