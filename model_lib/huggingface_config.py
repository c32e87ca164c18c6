"""Hugging Face's config.json: read, checked and written by the tables.

Options that change what the model computes are read, or refused by name if
there is nothing like them here; the others (dropout rates, token ids, labels,
versions) are left alone.
"""

import json
import numbers
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from model_lib.huggingface_albert import ALBERT
from model_lib.huggingface_bert import BERT, DISTILBERT
from model_lib.huggingface_tables import Architecture, Place
from model_lib.layers import ACTIVATIONS

CONFIG = 'config.json'
ARCHITECTURES: dict[str, Architecture] = {
  architecture.model_type: architecture
  for architecture in (BERT, DISTILBERT, ALBERT)
}
MODEL_TYPES = tuple(ARCHITECTURES)
# Options that would change the computation: their only legal values.
_ONLY: dict[str, tuple[Any, ...]] = {
  'position_embedding_type': ('absolute',),
  'is_decoder': (False,),
  'is_encoder_decoder': (False,),
  'add_cross_attention': (False,),
  'pruned_heads': ({}, None),
  'quantization_config': (None,),
}


def read_config(directory: pathlib.Path) -> dict[str, Any]:
  """Reads config.json and checks its type of model.

  Raises:
    ValueError: if it is missing, no JSON object, or of another model.
  """
  path = directory / CONFIG
  try:
    config = json.loads(path.read_text(encoding='utf-8'))
  except FileNotFoundError:
    raise ValueError(f'{path} is missing: not a Hugging Face model') from None
  except ValueError as error:
    raise ValueError(f'{path} is not JSON: {error}') from error
  if not isinstance(config, dict):
    raise ValueError(f'{path}: expected a JSON object, got {config!r:.80}')
  if config.get('model_type') not in MODEL_TYPES:
    raise ValueError(
      f'{path}: model_type: expected one of {MODEL_TYPES}, got '
      f'{config.get("model_type")!r}; if the file is merely too old to have '
      'one, add it'
    )
  return config


def to_fields(
  config: Mapping[str, Any], where: object, heads: str = 'classifier'
) -> dict[str, Any]:
  """The fields of the model as a checked config.json has them.

  Args:
    config: of `read_config`.
    where: the file, for messages.
    heads: those that are wanted.

  Raises:
    ValueError: naming the option, its legal values and the one given.
  """
  architecture = ARCHITECTURES[config['model_type']]
  architecture.check_heads(heads)
  only = {**_ONLY, **architecture.only}
  if heads == 'pretraining' and architecture.tie_option:
    only[architecture.tie_option] = (True,)
  for option, legal in only.items():
    if option in config and config[option] not in legal:
      expected = ' or '.join(map(repr, legal))
      raise ValueError(
        f'{where}: {option}: expected {expected}, nothing else is supported; '
        f'got {config[option]!r}'
      )
  fields = dict(architecture.defaults)
  for option, name in architecture.options.items():
    if option in config:
      expected, is_legal = _legal(name)
      if not is_legal(config[option]):
        raise ValueError(
          f'{where}: {option}: expected {expected}, got {config[option]!r}'
        )
      fields[name] = config[option]
  _check_together(architecture, fields, where)
  return fields


def _check_together(
  architecture: Architecture, fields: Mapping[str, Any], where: object
) -> None:
  """Raises ValueError if two options do not go together."""
  names = {name: option for option, name in architecture.options.items()}
  if fields['width'] % fields['num_heads']:
    raise ValueError(
      f'{where}: {names["num_heads"]}: expected a divisor of '
      f'{names["width"]} = {fields["width"]}, got {fields["num_heads"]}'
    )
  if fields.get('num_groups', 0) > fields.get('max_iterations', 0):
    raise ValueError(
      f'{where}: {names["num_groups"]}: expected at most '
      f'{names["max_iterations"]} = {fields["max_iterations"]}, got '
      f'{fields["num_groups"]}: a group would never be applied'
    )


def from_fields(
  model_type: str,
  fields: Mapping[str, Any],
  class_names: Sequence[str],
  heads: str = 'classifier',
) -> dict[str, Any]:
  """The config.json of a model.

  Args:
    model_type: 'bert', 'distilbert' or 'albert'.
    fields: all of the architecture's `defaults`, and `dropout`,
      `attention_dropout` and `classifier_dropout` if wanted.
    class_names: a name for each logit of a classifier; () otherwise.
    heads: those of the model.

  Raises:
    ValueError: if a field is missing or unknown, or the architecture fixes
      another value of it.
  """
  architecture = find(model_type)
  architecture.check_heads(heads)
  rates, defaults = architecture.rates, architecture.defaults
  if not set(defaults) <= set(fields) <= {*defaults, *rates}:
    raise ValueError(
      f'fields: expected {sorted(defaults)}, and perhaps {sorted(rates)}; got '
      f'{sorted(fields)}'
    )
  for name, value in architecture.fixed.items():
    if fields[name] != value:
      raise ValueError(
        f'{name}: expected {value!r}, which {model_type} fixes, got '
        f'{fields[name]!r}'
      )
  config: dict[str, Any] = {
    'architectures': [architecture.classes[heads]],
    'model_type': model_type,
    **{option: fields[name] for option, name in architecture.options.items()},
    **{rates[name]: fields[name] for name in rates if name in fields},
    'pad_token_id': 0,
  }
  if heads == 'classifier':
    config['id2label'] = {str(i): name for i, name in enumerate(class_names)}
    config['label2id'] = {name: i for i, name in enumerate(class_names)}
  # Checked as if it had been read: what is written can be read again.
  to_fields(config, CONFIG, heads)
  return config


def find(model_type: str) -> Architecture:
  """The architecture of this name.

  Raises:
    ValueError: if it is unknown.
  """
  if model_type not in ARCHITECTURES:
    raise ValueError(
      f'model_type: expected one of {MODEL_TYPES}, got {model_type!r}'
    )
  return ARCHITECTURES[model_type]


def layout(
  model_type: str,
  fields: Mapping[str, Any],
  num_classes: int,
  heads: str = 'classifier',
) -> dict[str, Place]:
  """The places of all tensors by their names there, without prefix."""
  sizes = {**fields, 'num_classes': num_classes}
  return {
    name: place
    for module in find(model_type).modules(fields, heads)
    for name, place in module.places(sizes)
  }


def has_classifier(config: Mapping[str, Any]) -> bool:
  """Whether tensors named `classifier` are of a sentence classifier.

  A tagger or a multiple-choice model has tensors of this name too.
  """
  names = config.get('architectures') or ['ForSequenceClassification']
  return any('ForSequenceClassification' in str(name) for name in names)


def _legal(name: str) -> tuple[str, Callable[[Any], bool]]:
  if name == 'activation':
    return (
      f'one of {tuple(ACTIVATIONS)}',
      lambda value: isinstance(value, str) and value in ACTIVATIONS,
    )
  if name == 'norm_epsilon':
    return (
      'a positive number',
      lambda value: isinstance(value, numbers.Real) and 0 < float(value) < 1,
    )
  return (
    'a positive integer',
    lambda value: (
      isinstance(value, int) and not isinstance(value, bool) and value > 0
    ),
  )
