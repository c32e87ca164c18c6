"""Configurations on the command line: --config=file.py, --config.key=value."""

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

EXAMPLE = 'configs/adatape/parity.py'


def load_config(
  flag: str, overrides: Sequence[str]
) -> ml_collections.ConfigDict:
  """Returns the complete configuration of `file.py[:argument]`.

  Overrides are texts such as 'optimizer.lr=1e-3'. Raises UsageError for a file
  that has no configuration, ConfigError for a field that is not legal.
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
    near = difflib.get_close_matches(path, files, 1) or [EXAMPLE]
    raise ConfigError('--config', path, f'a Python file such as {near[0]}')
  try:
    get_config = runpy.run_path(path)['get_config']
    page = get_config(argument) if argument else get_config()
    if not isinstance(page, (dict, ml_collections.ConfigDict)):
      raise TypeError(repr(page))
  except Exception as error:  # the file is the user's
    message = str(error)
    if not isinstance(error, ValueError):
      expected = 'a file whose get_config returns a ConfigDict'
      message = f'expected {expected}, got {type(error).__name__}: {error}'
    raise UsageError(f'--config={flag}: {message}') from error
  return page


def override(
  config: dict[str, Any], overrides: Sequence[str]
) -> dict[str, Any]:
  """Sets other values, read when the configuration is validated."""
  for text in overrides:
    key, separator, value = text.partition('=')
    if not separator:
      raise UsageError(f'--config.{key}: expected --config.{key}=value')
    *groups, name = key.split('.')
    node, place = config, ''
    for group in groups:
      if group not in node:
        raise ConfigError(place + group, value, fields.unknown(group, node))
      node, place = node[group], f'{place}{group}.'
      if not isinstance(node, dict):
        expected = f'{group!r} is a value, not a group of fields'
        raise UsageError(f'--config.{key}: {expected}')
    node[name] = fields.Unread(value)
  return config


def parse_fields(flag: str, text: str) -> dict[str, Any]:
  """Splits `name=folder,root=/data,image_size=64` into unread values."""
  values: dict[str, Any] = {}
  for item in text.split(','):
    name, separator, value = item.partition('=')
    if not separator:
      raise ConfigError(flag, item, 'key=value')
    values[name] = fields.Unread(value)
  return values
