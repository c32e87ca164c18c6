"""Hugging Face's BERT and DistilBERT: config.json and names of tensors.

Options that change what the model computes are read, or refused by name if
there is nothing like them here; the others (dropout rates, token ids, labels,
versions) are left alone.
"""

import json
import numbers
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from model_lib.bert_sizes import DEFAULTS
from model_lib.layers import ACTIVATIONS

CONFIG = 'config.json'

# Our field for each option that has one; absent options have the values of
# `DEFAULTS`, but for DistilBERT's depth.
_OPTIONS = {
  'bert': {
    'hidden_size': 'width',
    'num_hidden_layers': 'depth',
    'intermediate_size': 'mlp_dim',
    'num_attention_heads': 'num_heads',
    'vocab_size': 'vocab_size',
    'max_position_embeddings': 'max_positions',
    'type_vocab_size': 'type_vocab_size',
    'hidden_act': 'activation',
    'layer_norm_eps': 'norm_epsilon',
  },
  'distilbert': {
    'dim': 'width',
    'n_layers': 'depth',
    'hidden_dim': 'mlp_dim',
    'n_heads': 'num_heads',
    'vocab_size': 'vocab_size',
    'max_position_embeddings': 'max_positions',
    'activation': 'activation',
  },
}
MODEL_TYPES = tuple(_OPTIONS)
# What the architecture itself fixes.
_FIXED: dict[str, dict[str, Any]] = {
  'bert': {'pooler_activation': 'tanh'},
  'distilbert': {
    'type_vocab_size': 0,
    'norm_epsilon': 1e-12,
    'pooler_activation': 'relu',
  },
}
_DEFAULTS = {'bert': DEFAULTS, 'distilbert': DEFAULTS | {'depth': 6}}
# Options that would change the computation: their only legal values.
_ONLY: dict[str, tuple[Any, ...]] = {
  'position_embedding_type': ('absolute',),
  'is_decoder': (False,),
  'is_encoder_decoder': (False,),
  'add_cross_attention': (False,),
  'pruned_heads': ({}, None),
  'quantization_config': (None,),
}
# Dropout rates, which a configuration that is written may carry.
_RATES = {
  'bert': {
    'dropout': 'hidden_dropout_prob',
    'attention_dropout': 'attention_probs_dropout_prob',
    'classifier_dropout': 'classifier_dropout',
  },
  'distilbert': {
    'dropout': 'dropout',
    'attention_dropout': 'attention_dropout',
    'classifier_dropout': 'seq_classif_dropout',
  },
}
_ARCHITECTURES = {
  'bert': 'BertForSequenceClassification',
  'distilbert': 'DistilBertForSequenceClassification',
}

# Modules by their names here and there; those of a block come after
# `block_<i>/` here and `<stack>.<i>.` there.
_STACK = {'bert': 'encoder.layer', 'distilbert': 'transformer.layer'}
_TOP = {
  'bert': {
    'embeddings/word': 'embeddings.word_embeddings',
    'embeddings/position': 'embeddings.position_embeddings',
    'embeddings/token_type': 'embeddings.token_type_embeddings',
    'embeddings/norm': 'embeddings.LayerNorm',
    'pooler': 'pooler.dense',
    'head': 'classifier',
  },
  'distilbert': {
    'embeddings/word': 'embeddings.word_embeddings',
    'embeddings/position': 'embeddings.position_embeddings',
    'embeddings/norm': 'embeddings.LayerNorm',
    'pooler': 'pre_classifier',
    'head': 'classifier',
  },
}
_BLOCK = {
  'bert': {
    'attention/query': 'attention.self.query',
    'attention/key': 'attention.self.key',
    'attention/value': 'attention.self.value',
    'attention/out': 'attention.output.dense',
    'attention_norm': 'attention.output.LayerNorm',
    'mlp/hidden': 'intermediate.dense',
    'mlp/out': 'output.dense',
    'mlp_norm': 'output.LayerNorm',
  },
  'distilbert': {
    'attention/query': 'attention.q_lin',
    'attention/key': 'attention.k_lin',
    'attention/value': 'attention.v_lin',
    'attention/out': 'attention.out_lin',
    'attention_norm': 'sa_layer_norm',
    'mlp/hidden': 'ffn.lin1',
    'mlp/out': 'ffn.lin2',
    'mlp_norm': 'output_layer_norm',
  },
}
_LEAF = {
  'embedding': 'weight', 'kernel': 'weight', 'scale': 'weight', 'bias': 'bias'
}  # fmt: skip


class Place(NamedTuple):
  """Where a tensor goes.

  Attributes:
    name: of the parameter here.
    shape: of the parameter here.
  """

  name: str
  shape: tuple[int, ...]

  @property
  def transposed(self) -> bool:
    """Whether the tensor is the transpose of the parameter."""
    return self.name.endswith('/kernel')

  @property
  def shape_there(self) -> tuple[int, ...]:
    """Shape of the tensor."""
    return self.shape[::-1] if self.transposed else self.shape


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


def to_fields(config: Mapping[str, Any], where: object) -> dict[str, Any]:
  """The fields of `bert_sizes.DEFAULTS` as a checked config.json has them.

  Args:
    config: of `read_config`.
    where: the file, for messages.

  Raises:
    ValueError: naming the option, its legal values and the one given.
  """
  for option, legal in _ONLY.items():
    if option in config and config[option] not in legal:
      expected = ' or '.join(map(repr, legal))
      raise ValueError(
        f'{where}: {option}: expected {expected}, nothing else is supported; '
        f'got {config[option]!r}'
      )
  model_type = config['model_type']
  fields = _DEFAULTS[model_type] | _FIXED[model_type]
  names = {name: option for option, name in _OPTIONS[model_type].items()}
  for name, option in names.items():
    if option in config:
      expected, is_legal = _legal(name)
      if not is_legal(config[option]):
        raise ValueError(
          f'{where}: {option}: expected {expected}, got {config[option]!r}'
        )
      fields[name] = config[option]
  if fields['width'] % fields['num_heads']:
    raise ValueError(
      f'{where}: {names["num_heads"]}: expected a divisor of '
      f'{names["width"]} = {fields["width"]}, got {fields["num_heads"]}'
    )
  return fields


def from_fields(
  model_type: str, fields: Mapping[str, Any], class_names: Sequence[str]
) -> dict[str, Any]:
  """The config.json of a classifier.

  Args:
    model_type: 'bert' or 'distilbert'.
    fields: all of `bert_sizes.DEFAULTS`, and `dropout`, `attention_dropout` and
      `classifier_dropout` if wanted.
    class_names: a name for each logit.

  Raises:
    ValueError: if a field is missing or unknown, or the architecture fixes
      another value of it.
  """
  if model_type not in MODEL_TYPES:
    raise ValueError(
      f'model_type: expected one of {MODEL_TYPES}, got {model_type!r}'
    )
  rates = _RATES[model_type]
  if not set(DEFAULTS) <= set(fields) <= {*DEFAULTS, *rates}:
    raise ValueError(
      f'fields: expected {sorted(DEFAULTS)}, and perhaps {sorted(rates)}; got '
      f'{sorted(fields)}'
    )
  for name, value in _FIXED[model_type].items():
    if fields[name] != value:
      raise ValueError(
        f'{name}: expected {value!r}, which {model_type} fixes, got '
        f'{fields[name]!r}'
      )
  options = {
    option: fields[name] for option, name in _OPTIONS[model_type].items()
  }
  config = {
    'architectures': [_ARCHITECTURES[model_type]],
    'model_type': model_type,
    **options,
    **{rates[name]: fields[name] for name in rates if name in fields},
    'pad_token_id': 0,
    'id2label': {str(i): name for i, name in enumerate(class_names)},
    'label2id': {name: i for i, name in enumerate(class_names)},
  }
  # Checked as if it had been read: what is written can be read again.
  to_fields(config, CONFIG)
  return config


def layout(
  model_type: str, fields: Mapping[str, Any], num_classes: int
) -> dict[str, Place]:
  """The places of all tensors by their names there, without prefix."""
  modules = dict(_TOP[model_type])
  for index in range(fields['depth']):
    for ours, theirs in _BLOCK[model_type].items():
      name = f'{_STACK[model_type]}.{index}.{theirs}'
      modules[f'block_{index}/{ours}'] = name
  return {
    f'{theirs}.{_LEAF[leaf]}': Place(f'{ours}/{leaf}', shape)
    for ours, theirs in modules.items()
    for leaf, shape in _leaves(ours, fields, num_classes)
  }


def _leaves(
  module: str, fields: Mapping[str, Any], num_classes: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
  """The parameters of a module with their shapes."""
  width, mlp_dim = fields['width'], fields['mlp_dim']
  rows = {
    'embeddings/word': fields['vocab_size'],
    'embeddings/position': fields['max_positions'],
    'embeddings/token_type': fields['type_vocab_size'],
  }
  if module in rows:
    yield 'embedding', (rows[module], width)
  elif module.endswith('norm'):
    yield from (('scale', (width,)), ('bias', (width,)))
  else:
    inputs = mlp_dim if module.endswith('mlp/out') else width
    hidden = mlp_dim if module.endswith('mlp/hidden') else width
    outputs = num_classes if module == 'head' else hidden
    yield from (('kernel', (inputs, outputs)), ('bias', (outputs,)))


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
