"""Rules as files and commands named them before they were classes.

A run, a certificate or a bundle then had a word for the rule, and its settings
beside it: `model=dict(halting='act', epsilon=0.01)`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from core import fields, registry
from core.errors import ConfigError

_TOKENS = 'halting.token_rules:'
# Words of models.
NAMES = {
  '': f'{_TOKENS}Fixed',
  'fixed': f'{_TOKENS}Fixed',
  'act': f'{_TOKENS}ACT',
  'straight_through': f'{_TOKENS}StraightThrough',
  'skip': f'{_TOKENS}SkipACT',
  'ponder_net': f'{_TOKENS}PonderNet',
}
SETTINGS = ('epsilon', 'mu')
# Still names of the serving option `rule`.
EXITS = {
  word: f'halting.row_rules:{word.title()}'
  for word in (
    'confidence', 'entropy', 'margin', 'patience', 'combined', 'never'
  )
}  # fmt: skip


def model_fields(values: Mapping[str, Any], model: type) -> dict[str, Any]:
  """Returns the fields of a model; a rule with its settings is one field.

  Models without a field `rule`, and fields that the model has, are unchanged.
  """
  settings, legal = dict(values), fields.hints(model)
  if not fields.is_open(legal.get('rule')):
    return settings
  rule = settings.get('rule')
  if 'halting' in settings and 'halting' not in legal:
    rule = settings.pop('halting')
  is_word = isinstance(rule, str)
  if is_word:
    rule = {'name': NAMES.get(str(rule), str(rule))}
  beside = [name for name in SETTINGS if name in settings and name not in legal]
  own = {name: settings.pop(name) for name in beside}
  if is_word:
    own.setdefault('epsilon', 0.01)  # the default of all rules then
  if rule is None and own:
    default: Any = model
    rule = default.__dataclass_fields__['rule'].default
  if own:
    rule = _with(rule, own)
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
