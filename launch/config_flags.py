"""Configurations on the command line: --config=file.py, --config.key=value."""

import ast
import difflib
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections

from launch import command_line
from train_lib import run_config

# Groups whose fields the data set, model or evaluator declares: one with a
# default need not be in the file to be overridden.
OPEN = ('dataset', 'evals', 'loss', 'model', 'stages')


def load_config(
  flag: str, overrides: Sequence[str]
) -> ml_collections.ConfigDict:
  """Returns the complete configuration of `file.py[:argument]`.

  Args:
    flag: path of a Python file with `get_config`, and its argument.
    overrides: `'optimizer.lr=1e-3'`, read with the type of the default.

  Raises:
    UsageError: with the flag, the nearest legal name or the expected type.
    ConfigError: a field has an illegal value.
  """
  path, _, argument = flag.partition(':')
  if not path.endswith('.py') or not os.path.isfile(path):
    raise command_line.UsageError(
      f'--config: expected a Python file such as '
      f'configs/adatape/parity.py, got {path!r}{_near_file(path)}'
    )
  get_config = _get_config(path)
  try:
    page = get_config(argument) if argument else get_config()
  except Exception as error:  # the file is the user's
    name = '' if type(error) is ValueError else f'{type(error).__name__}: '
    raise command_line.UsageError(f'--config={flag}: {name}{error}') from error
  if not isinstance(page, (dict, ml_collections.ConfigDict)):
    raise command_line.UsageError(
      f'--config={flag}: expected get_config to return a ConfigDict, got '
      f'{page!r}'
    )
  given = page.to_dict() if hasattr(page, 'to_dict') else page
  config = ml_collections.ConfigDict(run_config.complete(given))
  apply_overrides(config, overrides)
  # Imported late: it imports jax, and a wrong flag is answered without.
  from train_lib import config_schema

  return config_schema.validate(config)


def apply_overrides(
  config: ml_collections.ConfigDict, overrides: Sequence[str]
) -> None:
  """Applies `key=value` overrides in place; see `load_config`."""
  config.lock()
  for override in overrides:
    _override(config, override)


def parse_fields(flag: str, text: str) -> dict[str, object]:
  """Reads `name=folder,root=/data,image_size=64` into a dictionary."""
  fields: dict[str, object] = {}
  for item in text.split(','):
    name, separator, value = item.partition('=')
    if not separator:
      raise command_line.UsageError(f'{flag}: expected key=value, got {item!r}')
    fields[name] = int(value) if re.fullmatch(r'-?\d+', value) else value
  return fields


def _get_config(path: str) -> Callable[..., Any]:
  spec = importlib.util.spec_from_file_location('experiment_config', path)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    return module.get_config
  except Exception as error:  # the file is the user's
    raise command_line.UsageError(
      f'--config: {path} is no configuration, expected a file that defines '
      f'get_config: {error}'
    ) from error


def _near_file(path: str) -> str:
  names = [
    os.path.join(folder, name)
    for folder, _, names in os.walk('configs')
    for name in names
    if name.endswith('.py') and not name.startswith('_')
  ]
  near = difflib.get_close_matches(path, names, 1)
  return f'; did you mean {near[0]!r}?' if near else ''


def _override(config: ml_collections.ConfigDict, override: str) -> None:
  key, separator, text = override.partition('=')
  if not separator:
    raise command_line.UsageError(
      f'--config.{key}: expected --config.{key}=value'
    )
  *parents, name = key.split('.')
  node = config
  for depth, parent in enumerate(parents):
    node = _child(node, parent, '.'.join(parents[:depth]))
    if not isinstance(node, ml_collections.ConfigDict):
      raise command_line.UsageError(
        f'--config.{key}: {parent!r} is a value, not a group of fields'
      )
  is_open = bool(parents) and parents[0] in OPEN
  is_group = is_open and isinstance(_literal(text), dict)
  if (is_open and name not in node) or is_group:
    with config.unlocked():
      node[name] = _literal(text)
    return
  current = _child(node, name, '.'.join(parents))
  with config.ignore_type():
    node[name] = read_value(key, text, current)


def _literal(text: str) -> object:
  if text.lower() in ('true', 'false'):
    return text.lower() == 'true'
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def _child(node: ml_collections.ConfigDict, name: str, prefix: str) -> Any:
  if name in node:
    return node[name]
  key = f'{prefix}.{name}' if prefix else name
  near = difflib.get_close_matches(name, list(node), 1, cutoff=0.5)
  hint = f'did you mean {near[0]!r}? ' if near else ''
  raise command_line.UsageError(
    f'--config.{key}: no such field; {hint}legal here: {sorted(node)}'
  )


def read_value(key: str, text: str, current: object) -> object:
  """Reads an override with the type of the value that it replaces.

  `1e3` is an integer where one is expected, `(1, 2)` and `1,2` are tuples.

  Raises:
    UsageError: the text is not of that type.
  """
  if isinstance(current, ml_collections.ConfigDict):
    raise command_line.UsageError(
      f'--config.{key}: a group of fields cannot be replaced from the command '
      'line; override its fields, or edit the file'
    )
  try:
    match current:
      case bool():
        legal = {'true': True, '1': True, 'false': False, '0': False}
        return legal[text.lower()]
      case int():
        return _integer(text)
      case float():
        return float(text)
      case str():
        return text
      case tuple():
        return _tuple(text, current)
      case _:  # None has no type
        return _literal(text)
  except (ValueError, KeyError, SyntaxError):
    raise command_line.UsageError(
      f'--config.{key}: expected {type(current).__name__}, got {text!r}'
    ) from None


def _integer(text: str) -> int:
  if re.fullmatch(r'[+-]?\d+', text):
    return int(text)
  number = float(text)
  if not number.is_integer():
    raise ValueError(text)
  return int(number)


def _tuple(text: str, current: tuple) -> tuple:
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    if text.startswith(('(', '[')):
      raise
    # Bare words: --config.dataset.augment=inception_crop,flip
    value = tuple(filter(None, text.split(',')))
  value = tuple(value) if isinstance(value, (tuple, list)) else (value,)
  kinds = {type(item) for item in current}
  if kinds and not all(type(item) in kinds | {int} for item in value):
    raise ValueError(text)
  return value


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  """Separates `--config.key=value` (or `--config.key value`) from the rest."""
  rest, overrides = [], []
  items = iter(argv)
  for item in items:
    if not item.startswith('--config.'):
      rest.append(item)
      continue
    body = item.removeprefix('--config.')
    if '=' not in body:
      body = f'{body}={next(items, "")}'
    overrides.append(body)
  return rest, overrides
