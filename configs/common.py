"""Arguments of configuration files, `config.py:n=32,model=transformer`.

Arguments choose the structure of a configuration: model, task, size, data,
checkpoint. Every other field is overridden by `--config.field=value`.
Fields that a configuration does not set have their defaults in
`train_lib.config_schema` and in the classes that it names.
"""

import difflib
from typing import Any

import ml_collections

GLUE = (
  'sst2', 'cola', 'mrpc', 'qqp', 'stsb', 'mnli', 'qnli', 'rte', 'wnli'
)  # fmt: skip

# Classes of `halting.token_rules` by the values of an argument.
RULES = {
  'act': 'ACT', 'straight_through': 'StraightThrough', 'skip': 'SkipACT',
  'ponder_net': 'PonderNet', 'fixed': 'Fixed',
}  # fmt: skip


def rule(name: str, **settings: Any) -> dict[str, Any]:
  """Returns the halting rule of a model."""
  return dict(name=f'halting.token_rules:{RULES[name]}', **settings)


def glue(a: ml_collections.ConfigDict, **fields: Any) -> dict[str, Any]:
  """Returns the data set of a GLUE task; a.data is a folder, '' for TFDS."""
  builder = '' if a.data else f'glue/{a.task}'
  return dict(
    name='glue', task=a.task, directory=a.data, builder=builder, **fields
  )


def adamw(lr: float) -> dict[str, Any]:
  """Returns the optimizer that BERT is fine-tuned with."""
  return dict(
    name='adamw', lr=lr, schedule='linear', warmup_steps=0.1,
    weight_decay=0.01, eps=1e-6,
  )  # fmt: skip


def glue_split(task: str) -> str:
  """Returns the name of the split to evaluate on."""
  return 'validation_matched' if task == 'mnli' else 'validation'


def submissions(task: str) -> dict[str, Any]:
  """Returns evaluations that write the test splits for GLUE's server."""
  splits = ['test']
  if task == 'mnli':
    splits = ['test_matched', 'test_mismatched', 'ax']
  return {f'submit_{s}': dict(type='submission', split=s) for s in splits}


def parse_arg(arg: str, **defaults: Any) -> ml_collections.ConfigDict:
  """Reads the argument of a configuration file, the text after the colon.

  `defaults` are the legal names with their default values; a value is read with
  the type of its default. A tuple lists the legal values of a name, the first
  being the default. Raises ValueError, naming the legal ones, for an unknown
  name or an illegal value.
  """
  values = {k: v[0] if isinstance(v, tuple) else v for k, v in defaults.items()}
  for item in filter(None, (arg or '').split(',')):
    name, separator, text = item.partition('=')
    if name not in defaults or not separator:
      near = difflib.get_close_matches(name, defaults, 1)
      hint = f'did you mean {near[0]!r}? ' if near else ''
      raise ValueError(
        f'config argument {item!r}: {hint}expected name=value with a name of '
        f'{sorted(defaults)}; fields are set by --config.field=value'
      )
    kind, legal = type(values[name]), defaults[name]
    try:
      value = kind(text)
    except ValueError:
      raise ValueError(
        f'config argument {name}: expected {kind.__name__}, got {text!r}'
      ) from None
    if isinstance(legal, tuple):
      expect(value in legal, name, f'one of {list(legal)}', text)
    values[name] = value
  return ml_collections.ConfigDict(values)


def expect(is_legal: bool, name: str, expected: str, given: Any) -> None:
  """Raises ValueError for an illegal value of an argument."""
  if not is_legal:
    message = f'config argument {name}: expected {expected}, got {given!r}'
    raise ValueError(message)
