"""Classification of images or token sequences by any model.

The model is called as `model(inputs, row_keys) -> (logits, out)`; subclasses
add the losses of an adaptive mechanism from `out` (see `extra_loss`).
"""

import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from dataset_lib import builder, image_ops
from dataset_lib.errors import ConfigError
from dataset_lib.fields import (
  REQUIRED,
  Field,
  check_fields,
  integer,
  locate,
  real,
)
from eval_lib.metrics import Average
from serve_lib.chain import NO_RUN, OneStage
from serve_lib.decisions import ClassifierPolicy, check_no_options
from serve_lib.image_items import ItemReader, images, token_rows
from train_lib.stages import Config
from train_lib.task import Batch, Task

# Fields that models of transformers share; what is particular to a model, it
# checks itself.
MODEL_FIELDS = {
  'depth': integer(1, 1000),
  'width': integer(1, 2**17),
  'mlp_dim': integer(1, 2**20),
  'num_heads': integer(1, 1024),
  'patch_size': integer(1, 4096),
  'vocab_size': integer(1, 2**24),
  'dropout': real(0.0, 0.99),
}


class Classification(Task):
  """Softmax cross-entropy, with label smoothing as an option.

  Configuration: `model.name` is `'module:Class'` of a Linen module and the
  other keys of `model` are its fields; `loss.label_smoothing` in [0, 1).
  """

  LOSS_FIELDS: ClassVar[dict[str, Field]] = {
    'label_smoothing': real(0.0, 0.999, default=0.0)
  }

  @classmethod
  def validate(cls, config: Config) -> None:
    """Checks `loss`, and `model` by constructing it; see `Task.validate`."""
    check_fields(config['loss'], cls.LOSS_FIELDS, 'loss')
    construct(config, num_classes=2)

  def build_model(self) -> Any:
    """Constructs the module from `config.model`."""
    return construct(self.config, self.info.num_classes)

  def init(self, rng):
    """Initialises with a batch of one; see `Task.init`."""
    shape = (1, *self.info.input_shape)
    batch = {self.info.input_key: jnp.zeros(shape, self.info.input_dtype)}
    variables = self.model.init(rng, self.inputs(batch))
    model_state = {k: v for k, v in variables.items() if k != 'params'}
    return variables['params'], model_state

  def inputs(self, batch: Batch) -> Array:
    """The model's input: symbols as they are, pixels scaled to [-1, 1]."""
    inputs = batch[self.info.input_key]
    if inputs.dtype != jnp.uint8:
      return inputs
    # Bytes go to the device and become numbers there: a quarter of the
    # transfer, and the host does no arithmetic.
    return inputs.astype(jnp.float32) / 127.5 - 1.0

  def apply(self, params, model_state, batch, row_keys=None):
    """Runs the model; returns (logits `[B, num_classes]`, out)."""
    return self.model.apply(
      {'params': params, **model_state}, self.inputs(batch), row_keys=row_keys
    )

  def normalizers(self, batch):
    """Real examples in the whole batch."""
    return {'examples': jnp.maximum(batch['mask'].sum(), 1.0)}

  def loss(self, params, model_state, frozen, batch, norm, row_keys, knobs):
    """Mean cross-entropy of the real rows plus `extra_loss`."""
    logits, out = self.apply(params, model_state, batch, row_keys)
    entropy = self.cross_entropy(logits, batch)
    loss = (entropy * batch['mask']).sum() / norm['examples']
    extra, metrics = self.extra_loss(out, batch, norm, knobs)
    metrics |= self.quality(logits, entropy, batch)
    return loss + extra, (metrics, model_state)

  def extra_loss(self, out, batch, norm, knobs) -> tuple[Array, dict[str, Any]]:
    """Losses and metrics of an adaptive mechanism; none here.

    Args:
      out: the model's second output.
      batch: the rows, for their mask.
      norm: denominators over the whole batch.
      knobs: traced scalars of the stage.
    """
    return jnp.zeros(()), {}

  def cross_entropy(
    self, logits: Float[Array, 'B K'], batch: Batch
  ) -> Float[Array, ' B']:
    """Cross-entropy of each row in nats, float32."""
    targets = jax.nn.one_hot(batch['label'], logits.shape[-1])
    smoothing = self.config['loss']['label_smoothing']
    if smoothing:
      targets = optax.smooth_labels(targets, smoothing)
    return optax.softmax_cross_entropy(logits.astype(jnp.float32), targets)

  def quality(self, logits, entropy, batch) -> dict[str, Any]:
    """Accuracy and cross-entropy over the real rows."""
    correct = (logits.argmax(-1) == batch['label']).astype(jnp.float32)
    return {
      'accuracy': Average.from_values(correct, batch['mask']),
      'cross_entropy': Average.from_values(entropy, batch['mask']),
    }

  def evaluate(self, params, model_state, batch):
    """Quality and the mechanism's metrics, without noise."""
    logits, out = self.apply(params, model_state, batch)
    _, metrics = self.extra_loss(out, batch, self.normalizers(batch), {})
    entropy = self.cross_entropy(logits, batch)
    return metrics | self.quality(logits, entropy, batch)

  def features(self, params, model_state, batch):
    """`out['features']` of the model."""
    return self.apply(params, model_state, batch)[1]['features']

  @property
  def label_names(self) -> tuple[str, ...]:
    """Names of the classes, their numbers without names; () for regression."""
    if self.info.num_classes == 1:
      return ()
    numbers = tuple(map(str, range(self.info.num_classes)))
    return tuple(self.info.class_names) or numbers

  def serve(self, variables, options, run=NO_RUN):
    """Serves the model as one stage, without options; see `Task.serve`."""
    check_no_options(options)
    if run.lengths is not None:
      raise ConfigError('lengths', run.lengths, 'none for inputs of one size')
    reader = self.item_reader()
    return one_stage(self, variables, reader, lengths=(1,))

  def item_reader(self, length: int = 1) -> ItemReader:
    """Returns the reader of the items of a service; see `image_items`.

    Args:
      length: the length bucket of every item.

    Raises:
      ConfigError: the inputs are neither images nor token ids.
    """
    info = self.info
    if info.input_key == 'image':
      options = image_ops.options_from(builder.validate(self.config['dataset']))
      prepare = functools.partial(image_ops.evaluation_image, options=options)
      return images(info.input_shape, prepare, length)
    if info.input_key != 'tokens':
      raise ConfigError('task', info.input_key, 'images, tokens or texts')
    return token_rows(info.input_shape[0], info.vocab_size, length)


def one_stage(
  task: Classification, variables: Any, reader: Any, lengths: Sequence[int]
) -> tuple[OneStage, ClassifierPolicy]:
  """Returns chain and policy of a model without exits.

  Args:
    task: its `apply` returns logits first.
    variables: see `Task.serve`.
    reader: of its items.
    lengths: length buckets.
  """

  def apply(variables: Any, batch: Batch) -> Array:
    model_state = variables.get('model_state', {})
    return task.apply(variables['params'], model_state, batch)[0]

  chain = OneStage(apply, variables, reader)
  return chain, ClassifierPolicy(chain, reader, task.label_names, lengths)


def construct(config: Config, num_classes: int) -> Any:
  """The Linen module of `config.model`, no parameters yet.

  Raises:
    ConfigError: if there is no such module, it has no such field, or it
      rejects a value.
  """
  given = dict(config['model'])
  module = locate(given.pop('name', ''), 'model.name')
  if not (isinstance(module, type) and issubclass(module, nn.Module)):
    raise ConfigError(
      'model.name', config['model']['name'], "'module:Class' of a Linen module"
    )
  check_fields(given, _model_fields(module), 'model')
  dtype = jnp.dtype(config['dtype'])
  try:
    return module(num_classes=num_classes, dtype=dtype, **given)
  except (TypeError, ValueError) as error:
    raise as_config_error(error, 'model', given) from error


def _model_fields(module: type[nn.Module]) -> dict[str, Field]:
  """A table of what can be configured: the module's own fields by type."""
  return {
    field.name: _model_field(field)
    for field in dataclasses.fields(module)
    if field.name not in ('num_classes', 'dtype', 'parent', 'name')
  }


def _model_field(field: dataclasses.Field) -> Field:
  required = field.default is dataclasses.MISSING
  default = REQUIRED if required else field.default
  if field.name in MODEL_FIELDS:
    legal = MODEL_FIELDS[field.name]
    # A default outside the range, such as 0 for "as the variant has it", is
    # the model's own affair.
    return Field(
      legal.expected,
      lambda value: legal.accepts(value) or value == field.default,
      default,
    )
  if typing.get_origin(field.type) is Sequence:
    (kind,) = typing.get_args(field.type)
    return _sequence_field(kind, default)
  kinds = typing.get_args(field.type) or (field.type,)
  legal_kinds = _legal_kinds(kinds)
  expected = ' or '.join(kind.__name__ for kind in kinds)
  return Field(expected, lambda value: type(value) in legal_kinds, default)


def _sequence_field(kind: type, default: Any) -> Field:
  legal_kinds = _legal_kinds((kind,))

  def accepts(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(
      type(item) in legal_kinds for item in value
    )

  return Field(f'a tuple of {kind.__name__}', accepts, default)


def _legal_kinds(kinds: tuple[type, ...]) -> set[type]:
  return {*kinds, int} if float in kinds else set(kinds)


def as_config_error(
  error: Exception, group: str, fields: Config
) -> ConfigError:
  """Turns a model's own error, `field: expected ..., got ...`, into ours."""
  name, separator, rest = str(error).partition(': expected ')
  if separator and name.isidentifier():
    expected, _, given = rest.rpartition(', got ')
    return ConfigError(f'{group}.{name}', fields.get(name, given), expected)
  return ConfigError(group, dict(fields), str(error))
