"""The files of a published model: config.json, tensors, tokenizer."""

import contextlib
import io
import json
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from core import files
from core.errors import ConfigError

Tensors = dict[str, np.ndarray]

CONFIG = 'config.json'
WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
PICKLED = ('pytorch_model.bin', 'pytorch_model.bin.index.json')
_FLOATS: dict[str, Any] = {
  'F64': np.float64, 'F32': np.float32, 'F16': np.float16,
  'BF16': jnp.bfloat16,
}  # fmt: skip
_MAX_LINES = 20  # of an error message
# Special tokens of ALBERT and of BERT; BERT's win.
_SPECIAL = (
  ('unk_token', '<unk>'), ('pad_token', '<pad>'), ('cls_token', '<s>'),
  ('sep_token', '</s>'), ('mask_token', '<mask>'),
  ('unk_token', '[UNK]'), ('pad_token', '[PAD]'), ('sep_token', '[SEP]'),
  ('cls_token', '[CLS]'), ('mask_token', '[MASK]'),
)  # fmt: skip


def peek_config(directory: files.Path) -> dict[str, Any]:
  """Reads config.json of a directory, {} if it is missing or damaged."""
  with contextlib.suppress(OSError, ValueError):
    return files.read_object(pathlib.Path(directory) / CONFIG)
  return {}


def read_tensors(path: pathlib.Path) -> Tensors:
  """Reads .npz, safetensors or a directory of them; no floats become uint8."""
  if path.is_file() or path.suffix == '.npz':
    return (_read_npz if path.suffix == '.npz' else _read_file)(path)
  if (path / WEIGHTS).exists():
    return _read_file(path / WEIGHTS)
  if not (path / INDEX).is_file():
    fix = ''.join(
      f'; {name} is pickled, could run any code and is not read: convert it '
      'with transformers, from_pretrained(...).save_pretrained(...)'
      for name in PICKLED
      if (path / name).is_file()
    )
    raise ValueError(f'{path} has neither {WEIGHTS} nor {INDEX}{fix}')
  weight_map = files.read_object(path / INDEX).get('weight_map')
  if not isinstance(weight_map, dict):
    raise ConfigError(f'{path / INDEX}: weight_map', weight_map, 'an object')
  tensors: Tensors = {}
  for name in sorted({str(file) for file in weight_map.values()}):
    if pathlib.PurePath(name).name != name or not name.endswith('.safetensors'):
      expected = 'names of .safetensors files in its directory'
      raise ConfigError(str(path / INDEX), name, expected)
    tensors |= _read_file(path / name)
  missing = sorted(set(weight_map) - set(tensors))
  _raise_problems(f'{path / INDEX} names tensors that no file has', missing)
  return {name: tensors[name] for name in weight_map}


def _read_file(path: pathlib.Path) -> Tensors:
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
    name: np.frombuffer(entry['data'], _FLOATS[entry['dtype']]).reshape(
      entry['shape']
    )
    if entry['dtype'] in _FLOATS
    else np.zeros(entry['shape'], np.uint8)
    for name, entry in entries
  }


def divided(tensors: Tensors, parts: Mapping[str, int]) -> Tensors:
  """Returns tensors, with each tensor of a module in `parts` cut in parts.

  'Wi.weight' becomes 'Wi#0.weight' and 'Wi#1.weight', each half the rows.
  """
  result = {}
  for name, tensor in tensors.items():
    module, _, leaf = name.rpartition('.')
    count = parts.get(module.rpartition('.')[2], 0)
    if not count:
      result[name] = tensor
      continue
    for index, part in enumerate(np.array_split(np.atleast_1d(tensor), count)):
      result[f'{module}#{index}.{leaf}'] = part
  return result


def joined(tensors: Tensors) -> Tensors:
  """Returns tensors of which parts, as of `divided`, are whole."""
  parts_of: dict[str, list[np.ndarray]] = {}
  for name, part in tensors.items():
    parts_of.setdefault(re.sub(r'#\d+', '', name), []).append(part)
  return {name: np.concatenate(parts) for name, parts in parts_of.items()}


def _read_npz(path: pathlib.Path) -> Tensors:
  tensors, name, limit = {}, 'the archive', files.MAX_WEIGHTS
  try:
    file = io.BytesIO(files.read_bytes(path, limit))
    archive = np.load(file, allow_pickle=False)
    if (size := sum(info.file_size for info in archive.zip.infolist())) > limit:
      raise ValueError(f'expected at most {limit} bytes, unpacked, got {size}')
    for name in archive.files:
      x = archive[name]
      # NumPy stores bfloat16 as 2 bytes without a type.
      x = x.view(jnp.bfloat16) if x.dtype == np.dtype('V2') else x
      is_float = x.dtype in _FLOATS.values()
      tensors[name] = x if is_float else np.zeros(x.shape, np.uint8)
  except Exception as error:  # of NumPy, zipfile or zlib
    raise ValueError(f'{path}: {name} is damaged ({error})') from error
  return tensors


def tokenizer_files(
  file: files.Path, fields: Mapping[str, Any]
) -> dict[str, str]:
  """Returns the files of a tokenizer by name, with their contents.

  `file` is a tokenizer.json, or a ValueError; `fields` are the model's.
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
  config: dict[str, Any] = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'model_max_length': fields['max_positions'],
    'model_input_names': inputs,
    'clean_up_tokenization_spaces': False,
    # A "[SEP]" in a text is text and no separator.
    'split_special_tokens': True,
  } | {name: token for name, token in _SPECIAL if token in vocabulary}
  texts = {'tokenizer.json': content.decode()}
  if isinstance(library.model, tokenizers.models.WordPiece):
    by_id = sorted(vocabulary, key=vocabulary.__getitem__)
    # The line number in vocab.txt is the id, so all ids must be used.
    if [vocabulary[token] for token in by_id] == list(range(len(by_id))):
      texts['vocab.txt'] = ''.join(f'{token}\n' for token in by_id)
    for option, name, absent in (
      ('do_lower_case', 'lowercase', False),
      ('strip_accents', 'strip_accents', None),
      ('tokenize_chinese_chars', 'handle_chinese_chars', False),
    ):
      config[option] = getattr(library.normalizer, name, absent)
  return texts | {'tokenizer_config.json': to_json(config)}


def to_json(content: Mapping[str, Any]) -> str:
  """Returns the text of a JSON file."""
  return json.dumps(content, indent=2, ensure_ascii=False) + '\n'


def check_tensors(
  path: pathlib.Path,
  tensors: Tensors,
  places: Mapping[str, str],
  optional: Sequence[str],
) -> None:
  """Raises ValueError unless there is a finite tensor for each place.

  `places` are our parameters. All tensors of a module of `optional` may be
  absent. Shapes are compared in `warm_start`, with a model.
  """

  def module(name: str) -> str:
    ours = f'{places[name]}/'
    return next((x for x in optional if ours.startswith(f'{x}/')), '')

  present = {'', *(module(name) for name in tensors if name in places)}
  check_names(path, [n for n in places if module(n) in present], tensors)
  problems = [
    f'{name}: expected finite numbers, got NaN, infinity or integers'
    for name, tensor in sorted(tensors.items())
    if tensor.dtype == np.uint8
    or not np.isfinite(tensor.astype(np.float32)).all()
  ]
  _raise_problems(f'{path} is damaged', problems)


def check_names(
  where: object, wanted: Collection[str], names: Collection[str]
) -> None:
  """Raises ValueError with all names of one side only."""
  lines = [f'{name}: missing' for name in sorted({*wanted} - {*names})]
  lines += [f'{name}: not supported' for name in sorted({*names} - {*wanted})]
  _raise_problems(f'{where} has other parameters than its model', lines)


def _raise_problems(title: str, lines: list[str]) -> None:
  """Raises ValueError with the title and the first lines, if there are any."""
  if lines:
    more = len(lines) - _MAX_LINES
    tail = [f'and {more} more'] if more > 0 else []
    raise ValueError('\n  '.join([title + ':', *lines[:_MAX_LINES], *tail]))
