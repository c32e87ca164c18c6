"""The files of a Hugging Face model: config.json, tensors, tokenizer."""

import contextlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from core import files
from core.errors import ConfigError
from model_lib.convert_tables import find

CONFIG = 'config.json'
WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
PICKLED = ('pytorch_model.bin', 'pytorch_model.bin.index.json')
FLOATS: dict[str, Any] = {
  'F64': np.float64, 'F32': np.float32, 'F16': np.float16,
  'BF16': jnp.bfloat16,
}  # fmt: skip
_MAX_LINES = 20  # of an error message
# Special tokens of ALBERT and of BERT; BERT's win.
_SPECIAL = (
  ('unk_token', '<unk>'), ('pad_token', '<pad>'),
  ('unk_token', '[UNK]'), ('pad_token', '[PAD]'), ('sep_token', '[SEP]'),
  ('cls_token', '[CLS]'), ('mask_token', '[MASK]'),
)  # fmt: skip


def read_config(path: pathlib.Path) -> dict[str, Any]:
  """Reads config.json of a text model; its model type is a known one."""
  config = files.read_object(path)
  find(config.get('model_type'), field=f'{path}: model_type')
  return config


def peek_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
  """Reads config.json of a directory, {} if it is missing or damaged."""
  with contextlib.suppress(OSError, ValueError):
    return files.read_object(pathlib.Path(directory) / CONFIG)
  return {}


def read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Reads a safetensors file, or a directory; no floats become uint8."""
  if path.is_file():
    return _read_file(path)
  if (path / WEIGHTS).exists():
    return _read_file(path / WEIGHTS)
  if not (path / INDEX).is_file():
    fix = ''
    for name in PICKLED:
      if (path / name).is_file():
        fix = (
          f'; {name} is pickled, could run any code and is not read: convert '
          'it with transformers, from_pretrained(...).save_pretrained(...)'
        )
    raise ValueError(f'{path} has neither {WEIGHTS} nor {INDEX}{fix}')
  weight_map = files.read_object(path / INDEX).get('weight_map')
  if not isinstance(weight_map, dict):
    raise ConfigError(f'{path / INDEX}: weight_map', weight_map, 'an object')
  tensors: dict[str, np.ndarray] = {}
  for name in sorted({str(file) for file in weight_map.values()}):
    if pathlib.PurePath(name).name != name or not name.endswith('.safetensors'):
      expected = 'names of .safetensors files in its directory'
      raise ConfigError(str(path / INDEX), name, expected)
    tensors |= _read_file(path / name)
  missing = sorted(set(weight_map) - set(tensors))
  raise_problems(f'{path / INDEX} names tensors that no file has', missing)
  return {name: tensors[name] for name in weight_map}


def _read_file(path: pathlib.Path) -> dict[str, np.ndarray]:
  with files.damage_of(path), files.opened(path, files.MAX_WEIGHTS):
    pass  # A pipe is not opened below.
  # `safetensors.numpy.load` knows no bfloat16.
  try:
    with safetensors.safe_open(path, 'numpy'):
      pass  # The sizes in its header are checked before all is read.
    content = files.read_bytes(path, files.MAX_WEIGHTS)
    entries = safetensors.deserialize(content)
  except safetensors.SafetensorError as error:
    raise ValueError(
      f'{path} is damaged or no safetensors file ({error}); copy it again'
    ) from error
  return {
    name: np.frombuffer(entry['data'], FLOATS[entry['dtype']]).reshape(
      entry['shape']
    )
    if entry['dtype'] in FLOATS
    else np.zeros(entry['shape'], np.uint8)
    for name, entry in entries
  }


def tokenizer_files(
  file: str | os.PathLike[str], fields: Mapping[str, Any]
) -> dict[str, str]:
  """Returns the files of a tokenizer by name, with their contents.

  `file` is a tokenizer.json, or a ValueError; `fields` are those of the model.
  """
  import tokenizers

  try:
    content = files.read_bytes(file)
    library = tokenizers.Tokenizer.from_buffer(content)
  except (KeyboardInterrupt, SystemExit):
    raise
  except BaseException as error:  # a panic of the library is no Exception
    raise ValueError(f'{file}: expected a tokenizer.json: {error}') from error
  vocabulary = library.get_vocab()
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
  for name, token in _SPECIAL:
    if token in vocabulary:
      config[name] = token
  texts = {'tokenizer.json': content.decode()}
  if isinstance(library.model, tokenizers.models.WordPiece):
    by_id = sorted(vocabulary, key=vocabulary.__getitem__)
    # The line number in vocab.txt is the id, so all ids must be used.
    if [vocabulary[token] for token in by_id] == list(range(len(by_id))):
      texts['vocab.txt'] = ''.join(f'{token}\n' for token in by_id)
    rules = library.normalizer
    config['do_lower_case'] = getattr(rules, 'lowercase', False)
    config['strip_accents'] = getattr(rules, 'strip_accents', None)
    chinese = getattr(rules, 'handle_chinese_chars', False)
    config['tokenize_chinese_chars'] = chinese
  return texts | {'tokenizer_config.json': to_json(config)}


def to_json(content: Mapping[str, Any]) -> str:
  """Returns the text of a JSON file."""
  return json.dumps(content, indent=2, ensure_ascii=False) + '\n'


def raise_unless_finite(
  path: pathlib.Path, tensors: Mapping[str, np.ndarray]
) -> None:
  """Raises ValueError naming tensors that are uint8 or not finite."""
  raise_problems(
    f'{path} is damaged',
    [
      f'{name}: expected finite numbers, got NaN, infinity or integers'
      for name, tensor in sorted(tensors.items())
      if tensor.dtype == np.uint8
      or not np.isfinite(tensor.astype(np.float32)).all()
    ],
  )


def raise_problems(title: str, lines: list[str]) -> None:
  """Raises ValueError with the title and the first lines, if there are any."""
  if lines:
    more = len(lines) - _MAX_LINES
    tail = [f'and {more} more'] if more > 0 else []
    raise ValueError('\n  '.join([title + ':', *lines[:_MAX_LINES], *tail]))
