"""The files of a Hugging Face model: config.json, tensors, tokenizer.

Options that change the computation are read, or refused by name if they are
not supported; others (dropout rates, token ids, labels, versions) are ignored.
"""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from model_lib.convert_tables import ARCHITECTURES, find
from model_lib.errors import FieldError

CONFIG = 'config.json'
WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
PICKLED = ('pytorch_model.bin', 'pytorch_model.bin.index.json')
_FLOATS = {'F64': np.float64, 'F32': np.float32, 'F16': np.float16,
           'BF16': jnp.bfloat16}  # fmt: skip
_MAX_LINES = 20  # of an error message
# Options that change the computation, and their supported values.
_ONLY: dict[str, tuple[Any, ...]] = {
  'position_embedding_type': ('absolute',),
  'is_decoder': (False,),
  'is_encoder_decoder': (False,),
  'add_cross_attention': (False,),
  'pruned_heads': ({}, None),
  'quantization_config': (None,),
}
# Special tokens of BERT and of ALBERT.
_SPECIAL = {
  'unk_token': ('[UNK]', '<unk>'),
  'sep_token': ('[SEP]',),
  'pad_token': ('[PAD]', '<pad>'),
  'cls_token': ('[CLS]',),
  'mask_token': ('[MASK]',),
}


def read_config(directory: pathlib.Path) -> dict[str, Any]:
  """Reads config.json and checks its model type.

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
  model_type = config.get('model_type')
  if model_type not in ARCHITECTURES:
    expected = f'one of {tuple(ARCHITECTURES)}; an old file may lack it'
    raise FieldError(f'{path}: model_type', model_type, expected)
  return config


def to_fields(
  config: Mapping[str, Any], where: object, heads: str = 'classifier'
) -> dict[str, Any]:
  """Returns the fields of the model that config.json describes.

  The model checks their ranges at construction.

  Args:
    config: of `read_config`.
    where: the file, for messages.
    heads: the heads that are loaded.

  Raises:
    FieldError: an option has an unsupported value, or one of another type.
  """
  architecture = find(config['model_type'], heads)
  for option, legal in {**_ONLY, **architecture.only}.items():
    if option in config and config[option] not in legal:
      expected = f'{" or ".join(map(repr, legal))}, the only supported value'
      raise FieldError(f'{where}: {option}', config[option], expected)
  fields = dict(architecture.defaults)
  for option, name in architecture.options.items():
    if option in config:
      kind = type(fields[name])
      if type(config[option]) is not kind:
        expected = f'a value such as {fields[name]!r}'
        raise FieldError(f'{where}: {option}', config[option], expected)
      fields[name] = config[option]
  return fields


def from_fields(
  model_type: str,
  fields: Mapping[str, Any],
  class_names: Sequence[str],
  heads: str = 'classifier',
) -> dict[str, Any]:
  """Returns the config.json of a model.

  Args:
    model_type: 'bert', 'distilbert' or 'albert'.
    fields: all of the architecture's `defaults`, and optionally `dropout`,
      `attention_dropout` and `classifier_dropout`.
    class_names: a name for each logit of a classifier, else ().
    heads: those of the model.

  Raises:
    FieldError: if a field is missing or unknown, or the architecture fixes
      another value of it.
  """
  architecture = find(model_type, heads)
  rates, defaults = architecture.rates, architecture.defaults
  if not set(defaults) <= set(fields) <= {*defaults, *rates}:
    expected = f'{sorted(defaults)}, and optionally {sorted(rates)}'
    raise FieldError('fields', sorted(fields), expected)
  for name, value in architecture.fixed.items():
    if fields[name] != value:
      expected = f'{value!r}, which {model_type} fixes'
      raise FieldError(name, fields[name], expected)
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
  to_fields(config, CONFIG, heads)
  return config


def tokenizer_files(
  file: str | os.PathLike[str], fields: Mapping[str, Any]
) -> dict[str, str]:
  """Returns the files of a tokenizer by name, with their contents.

  Args:
    file: a tokenizer.json of WordPiece, or of a SentencePiece unigram model.
    fields: of the model; see `to_fields`.

  Raises:
    ValueError: the file is no such tokenizer.
  """
  import tokenizers

  try:
    library = tokenizers.Tokenizer.from_file(os.fspath(file))
  except Exception as error:  # the library raises no other class
    raise ValueError(f'{file}: expected a tokenizer.json: {error}') from error
  vocabulary = library.get_vocab()
  has_words = isinstance(library.model, tokenizers.models.WordPiece)
  files = {'tokenizer.json': pathlib.Path(file).read_text(encoding='utf-8')}
  by_id = sorted(vocabulary, key=vocabulary.__getitem__)
  # The line number in vocab.txt is the id, so all ids must be used.
  dense = [vocabulary[token] for token in by_id] == list(range(len(by_id)))
  if dense and has_words:
    files['vocab.txt'] = ''.join(f'{token}\n' for token in by_id)
  inputs = ['input_ids', 'token_type_ids', 'attention_mask']
  if not fields['type_vocab_size']:
    inputs.remove('token_type_ids')
  config = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'model_max_length': fields['max_positions'],
    'model_input_names': inputs,
    'clean_up_tokenization_spaces': False,
    # A "[SEP]" in a text is text and no separator.
    'split_special_tokens': True,
  }
  if has_words:
    config |= {
      option: getattr(library.normalizer, name, default)
      for option, name, default in (
        ('do_lower_case', 'lowercase', False),
        ('strip_accents', 'strip_accents', None),
        ('tokenize_chinese_chars', 'handle_chinese_chars', False),
      )
    }
  for name, tokens in _SPECIAL.items():
    present = [token for token in tokens if token in vocabulary]
    if present:
      config[name] = present[0]
  files['tokenizer_config.json'] = to_json(config)
  return files


def to_json(content: Mapping[str, Any]) -> str:
  """Returns the text of a JSON file."""
  return json.dumps(content, indent=2, ensure_ascii=False) + '\n'


def read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Reads the tensors of a directory; those that are no floats as uint8.

  Raises:
    ValueError: files are missing, damaged or pickled.
  """
  if (path / WEIGHTS).is_file():
    return _read_file(path / WEIGHTS)
  if not (path / INDEX).is_file():
    pickled = [name for name in PICKLED if (path / name).is_file()]
    fix = (
      f'; {pickled[0]} is pickled, could run any code and is not read: convert '
      'it with transformers, from_pretrained(...) then save_pretrained(...)'
      if pickled
      else ''
    )
    raise ValueError(f'{path} has neither {WEIGHTS} nor {INDEX}{fix}')
  try:
    weight_map = dict(json.loads((path / INDEX).read_text())['weight_map'])
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f'{path / INDEX}: expected a JSON object with a weight_map: {error!r}'
    ) from error
  tensors: dict[str, np.ndarray] = {}
  for name in sorted({str(file) for file in weight_map.values()}):
    if pathlib.PurePath(name).name != name or not name.endswith('.safetensors'):
      expected = 'names of .safetensors files in its directory'
      raise FieldError(str(path / INDEX), name, expected)
    tensors |= _read_file(path / name)
  missing = sorted(set(weight_map) - set(tensors))
  raise_problems(f'{path / INDEX} names tensors that no file has', missing)
  return {name: tensors[name] for name in weight_map}


def _read_file(path: pathlib.Path) -> dict[str, np.ndarray]:
  try:
    entries = safetensors.deserialize(path.read_bytes())
  except FileNotFoundError:
    raise ValueError(f'{path} is missing, though {INDEX} names it') from None
  except safetensors.SafetensorError as error:
    raise ValueError(
      f'{path} is damaged or no safetensors file ({error}); copy it again'
    ) from error
  tensors = {}
  for name, entry in entries:
    dtype, shape = entry['dtype'], entry['shape']
    if dtype in _FLOATS:
      array = np.frombuffer(entry['data'], np.dtype(_FLOATS[dtype]))
      tensors[name] = array.reshape(shape)
    else:
      tensors[name] = np.zeros(shape, np.uint8)
  return tensors


def is_finite(tensor: np.ndarray) -> bool:
  """Returns True for an array of finite floats."""
  return tensor.dtype != np.uint8 and bool(
    np.isfinite(tensor.astype(np.float32)).all()
  )


def raise_problems(title: str, lines: list[str]) -> None:
  """Raises ValueError with the title and the first lines, if there are any."""
  if lines:
    more = len(lines) - _MAX_LINES
    tail = [f'and {more} more'] if more > 0 else []
    raise ValueError('\n  '.join([title + ':', *lines[:_MAX_LINES], *tail]))
