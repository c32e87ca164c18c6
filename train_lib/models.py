"""The model of a configuration: checked, completed, constructed."""

import contextlib
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

import flax.linen as nn
import jax.numpy as jnp
from annotated_types import Interval

from dataset_lib import fields
from dataset_lib.errors import ConfigError
from model_lib import huggingface
from model_lib.layers import ACTIVATIONS
from train_lib import strict_json
from train_lib.stages import Config

# Fields of a module that the task sets.
_SET_BY_TASK = ('num_classes', 'dtype')
# Ranges of fields that modules do not declare yet.
_UNDECLARED: dict[str, Any] = {
  'depth': Annotated[int, Interval(ge=1, le=1000)],
  'width': Annotated[int, Interval(ge=1, le=2**17)],
  'mlp_dim': Annotated[int, Interval(ge=1, le=2**20)],
  'num_heads': Annotated[int, Interval(ge=1, le=1024)],
  'patch_size': Annotated[int, Interval(ge=1, le=4096)],
  'vocab_size': Annotated[int, Interval(ge=1, le=2**24)],
  'dropout': Annotated[float, Interval(ge=0.0, le=0.99)],
  'max_positions': Annotated[int, Interval(ge=1, le=2**20)],
  'type_vocab_size': Annotated[int, Interval(ge=0, le=2**10)],
  'norm_epsilon': Annotated[float, Interval(ge=1e-20, le=0.1)],
  'attention_dropout': Annotated[float, Interval(ge=0.0, le=0.99)],
  'classifier_dropout': Annotated[float, Interval(ge=0.0, le=0.99)],
  'activation': Literal[tuple(ACTIVATIONS)],
  'pooler_activation': Literal[tuple(ACTIVATIONS)],
}


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
  for field, hint in _UNDECLARED.items():
    if field in given and given[field] != getattr(module, field, None):
      fields.check_value(f'model.{field}', given[field], hint)
  with model_errors(complete):
    built: Any = module(num_classes=2, **complete)
    if hasattr(built, 'sizes'):
      built.sizes()
  sizes = complete.get('width'), complete.get('num_heads')
  if all(sizes) and sizes[0] % sizes[1]:
    expected = f'a divisor of width {sizes[0]}'
    raise ConfigError('model.num_heads', sizes[1], expected)
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
    # Of modules that do not raise FieldError yet.
    field, separator, rest = str(error).partition(': expected ')
    if separator and field.isidentifier():
      expected, _, given = rest.rpartition(', got ')
      field, given = f'model.{field}', model.get(field, given)
      raise ConfigError(field, given, expected) from error
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
    if huggingface.is_checkpoint(directory):
      found = huggingface.read_sizes(directory)
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
