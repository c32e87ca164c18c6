"""Reads the tensors of a checkpoint: one safetensors file, or several.

Nothing is pickled, so that reading a checkpoint runs none of its code.
"""

import json
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import safetensors

WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
PICKLED = ('pytorch_model.bin', 'pytorch_model.bin.index.json')
_FLOATS = {'F64': np.float64, 'F32': np.float32, 'F16': np.float16,
           'BF16': jnp.bfloat16}  # fmt: skip
_MOST_LINES = 20  # of an error message


def read_tensors(
  path: pathlib.Path, constants: re.Pattern[str]
) -> dict[str, np.ndarray]:
  """All tensors of the one file of a directory, or of those of its index.

  Args:
    path: the directory.
    constants: matches the names that may hold something else than floating
      numbers; those come back empty.

  Raises:
    ValueError: files are missing, damaged or pickled, or hold other dtypes.
  """
  if (path / WEIGHTS).is_file():
    return _read_file(path / WEIGHTS, constants)
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
      raise ValueError(
        f'{path / INDEX}: expected names of .safetensors files beside it, got '
        f'{name!r}'
      )
    tensors |= _read_file(path / name, constants)
  missing = sorted(set(weight_map) - set(tensors))
  raise_problems(f'{path / INDEX} names tensors that no file has', missing)
  return {name: tensors[name] for name in weight_map}


def _read_file(
  path: pathlib.Path, constants: re.Pattern[str]
) -> dict[str, np.ndarray]:
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
    dtype = entry['dtype']
    if dtype not in _FLOATS:
      # Constants such as position_ids; a weight would be missing later.
      if not constants.match(name):
        raise ValueError(
          f'{path}: {name}: expected one of {tuple(_FLOATS)}, got {dtype}'
        )
      dtype, entry = 'F32', {'data': b'', 'shape': [0]}
    array = np.frombuffer(entry['data'], np.dtype(_FLOATS[dtype]))
    tensors[name] = array.reshape(entry['shape'])
  return tensors


def raise_problems(title: str, lines: list[str]) -> None:
  """Raises ValueError with the title and the first lines, if there are any."""
  if lines:
    more = len(lines) - _MOST_LINES
    tail = [f'and {more} more'] if more > 0 else []
    raise ValueError('\n  '.join([title + ':', *lines[:_MOST_LINES], *tail]))
