"""Rules as files and commands named them before they were classes.

A run, a certificate or a bundle then had a word for the rule, and its settings
beside it: `model=dict(halting='act', epsilon=0.01)`.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from core import fields, registry
from core.errors import ConfigError

# Words of token rules: most are the class in snake case.
_CLASSES = 'ACT', 'StraightThrough', 'PonderNet', 'Fixed'
_WORDS = {'': 'Fixed', 'skip': 'SkipACT'} | {
  re.sub('(?<=[a-z])(?=[A-Z])', '_', name).lower(): name for name in _CLASSES
}
_SETTINGS = ('epsilon', 'mu')
# Still names of the serving option `rule`.
_EXITS = 'confidence', 'entropy', 'margin', 'patience', 'combined', 'never'
EXITS = {word: f'halting.row_rules:{word.title()}' for word in _EXITS}


def token_rule(word: str) -> str:
  """Returns the class of a token rule; what is no old word is unchanged."""
  return f'halting.token_rules:{_WORDS[word]}' if word in _WORDS else word


def model_fields(values: Mapping[str, Any], model: type) -> dict[str, Any]:
  """Returns the fields of a model; a rule with its settings is one field.

  Models without a field `rule`, and fields that the model has, are unchanged.
  """
  settings, legal = dict(values), fields.hints(model)
  if not fields.is_open(legal.get('rule')):
    return settings
  rule: Any = settings.pop('rule', None)
  if 'halting' not in legal:
    rule = settings.pop('halting', rule)
  beside = [n for n in _SETTINGS if n in settings and n not in legal]
  own = {name: settings.pop(name) for name in beside}
  if isinstance(rule, str):
    rule = {'name': token_rule(rule)}
    own.setdefault('epsilon', 0.01)  # the default of all rules then
  if own:
    fallback: Any = model
    default = fallback.__dataclass_fields__['rule'].default
    rule = _with(default if rule is None else rule, own)
  return settings if rule is None else settings | {'rule': rule}


def _with(rule: Any, settings: dict[str, Any]) -> dict[str, Any]:
  """Returns a rule with settings; those without effect are left out."""
  if dataclasses.is_dataclass(rule):
    rule = registry.described(rule)
  if not isinstance(rule, fields.ConfigLike):
    raise ConfigError('model.rule', rule, "dict(name='module:Class', ...)")
  kind = registry.locate(rule.get('name'), 'model.rule.name')
  unused = {*settings} - {*fields.hints(kind)}
  unused &= {'epsilon'} | {k for k, v in settings.items() if str(v) == '1'}
  return dict(rule) | {k: settings[k] for k in settings if k not in unused}
