"""Which tensors of a Hugging Face checkpoint are wanted; whether they fit."""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from model_lib.huggingface_config import CONFIG, has_classifier
from model_lib.huggingface_tables import Architecture, Place
from model_lib.safetensors_files import raise_problems, read_tensors

# A checkpoint may be without them: they are trained for a task.
_OPTIONAL = ('pooler', 'head', 'sop')
# Masked words, next sentence, answers to questions; and constants.
_OTHER_TASKS = (
  r'cls\.|qa_outputs\.|vocab_(transform|layer_norm|projector)\.|'
  r'(.*\.)?(position|token_type)_ids$'
)


def select(
  path: pathlib.Path,
  config: Mapping[str, Any],
  architecture: Architecture,
  heads: str,
) -> tuple[dict[str, Any], tuple[str, ...]]:
  """Reads the tensors of a directory.

  Args:
    path: the directory.
    config: its config.json.
    architecture: of the model.
    heads: those that are wanted.

  Returns:
    The wanted tensors by their names without prefix, and the names of the
    others.

  Raises:
    ValueError: files are missing or damaged, or tensors that should be tied
      are not.
  """
  pattern = _not_wanted(architecture, config, heads)
  tensors, ignored = _wanted(read_tensors(path, pattern), architecture, pattern)
  _untie(path, tensors, architecture)
  return tensors, ignored


def _not_wanted(
  architecture: Architecture, config: Mapping[str, Any], heads: str
) -> re.Pattern[str]:
  """Matches the names, without prefix, of constants and of other tasks."""
  tops: set[str] = set()
  for other in architecture.heads:
    tops |= set(architecture.unprefixed(other))
  tops -= set(architecture.unprefixed(heads))
  if not has_classifier(config):
    tops.add('classifier.')
  return re.compile('|'.join([_OTHER_TASKS, *map(re.escape, sorted(tops))]))


def _wanted(
  tensors: Mapping[str, Any],
  architecture: Architecture,
  not_wanted: re.Pattern[str],
) -> tuple[dict[str, Any], tuple[str, ...]]:
  """Tensors by their names without prefix, and the names of the others."""
  kept: dict[str, Any] = {}
  ignored = []
  for name, tensor in tensors.items():
    short = name.removeprefix(f'{architecture.model_type}.')
    # LayerNorm's parameters as the first checkpoints called them.
    short = re.sub(r'\.gamma$', '.weight', re.sub(r'\.beta$', '.bias', short))
    if not_wanted.match(short):
      ignored.append(name)
    elif short in kept:
      raise ValueError(f'two tensors for one parameter, one of them {name!r}')
    else:
      kept[short] = tensor
  return kept, tuple(ignored)


def _untie(
  path: pathlib.Path, tensors: dict[str, Any], architecture: Architecture
) -> None:
  """Takes away the second name of tied tensors, in place.

  Raises:
    ValueError: the tensors of two such names differ.
  """
  for name, original in architecture.tied.items():
    tensor = tensors.pop(name, None)
    if tensor is None:
      continue
    # One of the two names is enough, whichever it is.
    wanted = tensors.setdefault(original, tensor)
    same = wanted.shape == tensor.shape and np.array_equal(
      wanted.astype(np.float32), tensor.astype(np.float32), equal_nan=True
    )
    if not same:
      raise ValueError(
        f'{path}: {name}: expected the values of {original}, to which it is '
        'tied, got others; such a decoder of its own is not supported'
      )


def check_tensors(
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


def check_params(
  arrays: Mapping[str, np.ndarray], places: Mapping[str, Place], model: str
) -> None:
  """Raises ValueError unless there is a parameter for every place."""
  expected = {place.name: place.shape for place in places.values()}
  given = {name: array.shape for name, array in arrays.items()}
  raise_problems(
    f'params are not those of a {model}',
    [
      f'{name}: expected {_words(expected.get(name))}, got '
      f'{_words(given.get(name))}'
      for name in sorted({*expected, *given})
      if expected.get(name) != given.get(name)
    ],
  )


def _words(shape: tuple[int, ...] | None) -> str:
  return 'nothing' if shape is None else f'shape {list(shape)}'
