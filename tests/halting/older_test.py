"""Runs, certificates and commands that name rules as before."""

import copy

import pytest

from adatape.ponder_vit import PonderViT
from adatape.universal import UniversalTransformer
from albert_act.model import AlbertClassifier
from core import registry
from core.errors import ConfigError
from halting import older
from halting.rule import TokenRule
from halting.token_rules import (
  ACT,
  Fixed,
  PonderNet,
  SkipACT,
  StraightThrough,
)
from launch import command_line
from model_lib.vit import ViT
from recurrent_act.model import RecurrentModel
from train_lib import run_directory


@pytest.mark.parametrize(
  ('model', 'values', 'rule'),
  [
    (AlbertClassifier, dict(halting='', epsilon=0.01), Fixed()),
    (AlbertClassifier, dict(halting='act', epsilon=0.2), ACT(0.2)),
    (AlbertClassifier, dict(halting='ponder_net', epsilon=0.5), PonderNet()),
    (AlbertClassifier, dict(epsilon=0.4), ACT(0.4)),
    (RecurrentModel, dict(rule='act', epsilon=0.01, mu=1), ACT()),
    (RecurrentModel, dict(rule='skip', epsilon=0.01, mu=5), SkipACT(mu=5)),
    (RecurrentModel, dict(rule='fixed', epsilon=0.01, mu=1), Fixed()),
    (UniversalTransformer, dict(halting='token', epsilon=0.1), ACT(0.1)),
    (UniversalTransformer,
     dict(rule=registry.described(StraightThrough()), epsilon=0.3),
     StraightThrough(0.3)),
  ],
)  # fmt: skip
def test_a_rule_and_its_settings_are_one_field(model, values, rule):
  new = older.model_fields(values, model)
  assert registry.named(new.pop('rule'), 'rule', TokenRule) == rule
  assert new in ({}, {'halting': 'token'})


def test_a_word_that_was_none_is_refused_as_it_is_typed():
  for word in ('', 'fixed', 'act', 'straight_through', 'skip', 'ponder_net'):
    assert older.token_rule(word).startswith('halting.token_rules:')
  for word in ('threshold', 'Fixed', 'PONDER_NET', 'foo'):
    with pytest.raises(ConfigError, match=f"rule.name: .* got '{word}'"):
      older.model_fields(dict(rule=word), RecurrentModel)


@pytest.mark.parametrize(
  ('model', 'values'),
  [
    (PonderViT, dict(max_steps=3)), (ViT, dict(epsilon=0.1, halting='act')),
    (AlbertClassifier, dict(rule=registry.described(ACT(0.3)))),
  ],
)  # fmt: skip
def test_other_fields_stay(model, values):
  assert older.model_fields(values, model) == values


def test_a_run_of_before_is_resumed():
  given = command_line.load_config('configs/recurrent_act/graves.py', [])
  old = copy.deepcopy(given.to_dict())
  old['model'] = dict(old['model'])
  rule = old['model'].pop('rule')
  old['model'] |= dict(rule='act', mu=1, epsilon=rule['epsilon'])
  assert not run_directory.changes(old, given.to_dict())
  old['model']['epsilon'] = 0.02
  (changed,) = run_directory.changes(old, given.to_dict())
  assert changed == 'model.rule.epsilon: saved 0.02, given 0.01'


def test_overrides_of_before_are_those_of_the_rule():
  file, override = 'configs/recurrent_act/graves.py', 'model.epsilon=0.05'
  assert command_line.load_config(file, [override]).model.rule.epsilon == 0.05
