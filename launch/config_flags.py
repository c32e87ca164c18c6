"""Configurations on the command line: --config=file.py, --config.key=value."""

import copy
import difflib
import os
import pathlib
import runpy
from collections.abc import Sequence
from typing import Any

import ml_collections

from dataset_lib import fields
from dataset_lib.errors import ConfigError
from launch.command_line import UsageError


def load_config(
  flag: str, overrides: Sequence[str]
) -> ml_collections.ConfigDict:
  """Returns the complete configuration of `file.py[:argument]`.

  Overrides are texts such as 'optimizer.lr=1e-3'.

  Raises:
    UsageError: there is no such file, or it has no configuration.
    ConfigError: a field is unknown or has an illegal value.
  """
  page = _read_page(flag)
  # Imported late: it imports jax, and a wrong flag is answered without.
  from train_lib import config_schema

  config = config_schema.complete(page)
  return config_schema.validate(override(config, overrides))


def _read_page(flag: str) -> Any:
  path, _, argument = flag.partition(':')
  if not path.endswith('.py') or not os.path.isfile(path):
    files = [str(p) for p in pathlib.Path('configs').rglob('[!_]*.py')]
    near = difflib.get_close_matches(path, files, 1)
    hint = f'; did you mean {near[0]!r}?' if near else ''
    raise UsageError(
      f'--config: expected a Python file such as configs/adatape/parity.py, '
      f'got {path!r}{hint}'
    )
  try:
    get_config = runpy.run_path(path)['get_config']
  except Exception as error:  # the file is the user's
    raise UsageError(
      f'--config: {path} is no configuration, expected a file that defines '
      f'get_config: {error}'
    ) from error
  try:
    page = get_config(argument) if argument else get_config()
  except Exception as error:  # the file is the user's
    is_explained = type(error) in (ValueError, ConfigError)
    name = '' if is_explained else f'{type(error).__name__}: '
    raise UsageError(f'--config={flag}: {name}{error}') from error
  if not isinstance(page, (dict, ml_collections.ConfigDict)):
    raise UsageError(
      f'--config={flag}: expected get_config to return a ConfigDict, got '
      f'{page!r}'
    )
  return page


def override(
  config: dict[str, Any], overrides: Sequence[str]
) -> dict[str, Any]:
  """Returns a configuration with other values, read when it is validated."""
  config = copy.deepcopy(config)
  for text in overrides:
    key, separator, value = text.partition('=')
    if not separator:
      raise UsageError(f'--config.{key}: expected --config.{key}=value')
    *groups, name = key.split('.')
    node = config
    for depth, group in enumerate(groups, 1):
      if group not in node:
        place = '.'.join(groups[:depth])
        raise ConfigError(place, value, fields.unknown(group, node))
      node = node[group]
      if not isinstance(node, dict):
        raise UsageError(
          f'--config.{key}: {group!r} is a value, not a group of fields'
        )
    node[name] = fields.Unread(value)
  return config


def parse_fields(flag: str, text: str) -> dict[str, Any]:
  """Splits `name=folder,root=/data,image_size=64` into unread values."""
  values: dict[str, Any] = {}
  for item in text.split(','):
    name, separator, value = item.partition('=')
    if not separator:
      raise UsageError(f'{flag}: expected key=value, got {item!r}')
    values[name] = fields.Unread(value)
  return values


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  """Separates `--config.key=value` (or `--config.key value`) from the rest."""
  rest, overrides = [], []
  items = iter(argv)
  for item in items:
    if not item.startswith('--config.'):
      rest.append(item)
      continue
    body = item.removeprefix('--config.')
    overrides.append(body if '=' in body else f'{body}={next(items, "")}')
  return rest, overrides
