"""The model of a configuration: checked, completed, constructed."""

import contextlib
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from dataset_lib import fields
from dataset_lib.errors import ConfigError
from model_lib import convert
from train_lib import strict_json
from train_lib.stages import Config

# Fields of a module that the task sets.
_SET_BY_TASK = ('num_classes', 'dtype')


def complete_model(
  model: Mapping[str, Any], kind: type[nn.Module] = nn.Module
) -> dict[str, Any]:
  """Returns `config.model` with all fields of the module.

  Args:
    model: `name` and fields of the module.
    kind: class that the module must have.

  Raises:
    ConfigError: there is no such module, or it rejects a field.
  """
  given = dict(model)
  name = given.pop('name', '')
  module = fields.locate(name, 'model.name')
  if not (isinstance(module, type) and issubclass(module, kind)):
    legal = f'{kind.__module__}:{kind.__name__}'
    expected = f"'{legal}' or a subclass"
    if kind is nn.Module:
      expected = "'module:Class' of a Linen module"
    raise ConfigError('model.name', name, expected)
  complete = fields.check(module, given, 'model', without=_SET_BY_TASK)
  with model_errors(complete):
    built: Any = module(num_classes=2, **complete)
  # The module may have set sizes that its variant determines.
  return {'name': name} | {field: getattr(built, field) for field in complete}


def construct(config: Config, num_classes: int) -> Any:
  """Returns the Linen module of a complete configuration."""
  given = dict(config['model'])
  module = fields.locate(given.pop('name'), 'model.name')
  dtype = jnp.dtype(config['dtype'])
  return module(num_classes=num_classes, dtype=dtype, **given)


@contextlib.contextmanager
def model_errors(model: Config) -> Iterator[None]:
  """Turns the errors of a module into those of `config.model`.

  Raises:
    ConfigError: with the field that the module rejects, or with all of them.
  """
  try:
    with fields.errors_under('model'):
      yield
  except ConfigError:
    raise
  except (TypeError, ValueError) as error:
    raise ConfigError('model', dict(model), str(error)) from error


def checkpoint_fields(directory: str, names: Collection[str]) -> dict[str, Any]:
  """Reads the fields of `model` that a checkpoint determines.

  Args:
    directory: of a Hugging Face model or of a run.
    names: the fields.

  Raises:
    ConfigError: the directory is neither, or has an unsupported option.
  """
  field = 'model.from_checkpoint'
  expected = 'the directory of a run or of a Hugging Face model'
  try:
    if convert.is_checkpoint(directory):
      found = convert.read_sizes(directory)
    else:
      found = strict_json.loads(
        (pathlib.Path(directory) / 'config.json').read_text()
      )['model']
      found = {name: found[name] for name in names if name in found}
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ConfigError(field, directory, f'{expected} ({error})') from error
  if set(found) != set(names):
    expected = f'{expected} with the fields {", ".join(names)}'
    given = f'{directory} with {", ".join(found)}'
    raise ConfigError(field, given, expected)
  return found
