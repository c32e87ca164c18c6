"""Classification of images or token sequences by any model.

A model returns (logits, out) for `(inputs, row_keys=...)`; the terms that a
subclass adds read `out`.
"""

import dataclasses
import math
import pathlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Interval
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from core import fields, files
from core.errors import ConfigError
from dataset_lib.source import DatasetInfo
from eval_lib.metrics import CLASS_ACCURACY, Average, ByClass
from model_lib import sizes
from train_lib import mixup
from train_lib.task import Task, complete_model, construct, model_errors
from train_lib.terms import Batch, Forward, Metrics, Term

TOP = 5  # classes of the metric `top5_accuracy`


class Classification(Task):
  """Softmax cross-entropy, with label smoothing and mixup as options.

  `model.from_checkpoint`, a run or a published ViT, gives the sizes of a model
  of images that are not stated.
  """

  SERVE = 'serve_lib.classifier:serve'
  MODEL: ClassVar[type[nn.Module]] = nn.Module  # required base class
  MULTI_LABEL: ClassVar[bool] = False  # rows of the data have several labels
  # Of a model without its own: variants, and what a checkpoint determines.
  SIZES: ClassVar[sizes.Sizes] = sizes.VIT

  @dataclasses.dataclass(frozen=True)
  class Loss:
    """Legal fields of `loss`."""

    label_smoothing: Annotated[float, Interval(ge=0.0, le=0.999)] = 0.0
    # Parameter of the Beta distribution of `train_lib.mixup`; 0 mixes nothing.
    mixup: Annotated[float, Interval(ge=0.0, le=100.0)] = 0.0

  @classmethod
  def validate_config(cls, config: dict[str, Any]) -> None:
    """Also checks `model`; see `Task.validate_config`."""
    super().validate_config(config)
    takes_keys = cls.apply is Task.apply
    config['model'] = complete_model(
      config['model'], cls.MODEL, cls._known_fields, takes_keys
    )
    optimizer = config.get('optimizer', {})
    if 'scales' in optimizer:
      scales = by_layer(optimizer['scales'], config['model'])
      optimizer['scales'] = (*scales,)
    alpha = config['loss'].get('mixup')
    if alpha and 'image_size' not in config['dataset']:
      raise ConfigError('loss.mixup', alpha, '0 for inputs other than images')

  @classmethod
  def _known_fields(cls, module: Any, model: dict[str, Any]) -> dict[str, Any]:
    """Returns sizes of a variant or `from_checkpoint`, which is taken out."""
    sizes, values = getattr(module, 'SIZES', None), dict[str, Any]()
    if sizes and model.get('variant'):
      with model_errors(model):
        values = sizes.fields(model['variant'])
    names = (sizes or cls.SIZES).defaults
    directory = model.pop('from_checkpoint', '')
    values |= checkpoint_fields(directory, names)
    if directory and 'num_heads' not in values | model:
      expected = f'a number, as {directory} tells none: give it, as by '
      expected += '--config.model.num_heads=12'
      raise ConfigError('model.num_heads', None, expected)
    return values

  @property
  def rows_together(self) -> int:
    """Two rows of a mixup pair; see `Task.rows_together`."""
    return mixup.PAIR if self.config['loss'].get('mixup') else 1

  def build_model(self) -> Any:
    """Returns the module of `config.model`; checks that it fits the data."""
    most = self.info.max_labels
    if bool(most) != self.MULTI_LABEL:
      expected = '>= 1' if self.MULTI_LABEL else '0, one label a row,'
      expected += f' for {type(self).__name__}'
      raise ConfigError('dataset.max_labels', most, expected)
    model = construct(self.config, self.info.num_classes)
    check_sizes(model, self.info)
    return model

  @property
  def num_logits(self) -> int:
    """The classes of the model, which a task of its own may choose."""
    return self.model.num_classes

  def example(self) -> dict[str, Array]:
    """Returns a batch of one row, to initialize the model with."""
    shape = (1, *self.info.input_shape)
    return {self.info.input_key: jnp.zeros(shape, self.info.input_dtype)}

  def inputs(self, batch: Batch) -> Array:
    """Returns the model's input: symbols, or pixels normalised as of `info`."""
    inputs = batch[self.info.input_key]
    # Images are sent as uint8 (a quarter of float32) and scaled on the device.
    if inputs.dtype != jnp.uint8:
      return inputs
    scale = np.array([self.info.mean, self.info.std], np.float32)
    mean, std = scale.reshape(2, 1, 1, 1, -1)
    return inputs.astype(jnp.float32) / (255 * std) - mean / std

  def arguments(self, batch: Batch) -> tuple[Array, ...]:
    """Returns the positional arguments of the model."""
    return (self.inputs(batch),)

  def mixed(self, batch, row_keys):
    """Mixes images in training, if `loss.mixup` is set; see `Task.mixed`."""
    alpha = self.config['loss'].get('mixup')
    if row_keys is None or not alpha:
      return super().mixed(batch, row_keys)
    key = self.info.input_key
    return mixup.mix({**batch, key: self.inputs(batch)}, key, row_keys, alpha)

  def terms(self, forward):
    """Returns the loss of the logits."""
    return (Term(self.target_loss(forward, forward.logits)),)

  def target_loss(
    self, forward: Forward, logits: Float[Array, 'B *G K']
  ) -> Float[Array, 'B ...']:
    """Returns `cross_entropy` of smoothed labels, in shares if they are mixed.

    It is linear in the targets, so it is mixed, not the labels.
    """
    parts = [s * self.cross_entropy(logits, b) for s, b in forward.targets]
    losses: Any = sum(parts[1:], start=parts[0])
    smoothing = self.config['loss'].get('label_smoothing')
    if not smoothing or self.info.num_classes == 1:
      return losses
    logs = jax.nn.log_softmax(logits.astype(jnp.float32)).mean(-1)
    # Several targets of one item count the sum, as in `cross_entropy`.
    logs = logs.reshape(*losses.shape, -1).sum(-1)
    return (1 - smoothing) * losses - smoothing * logs

  def row_flops(self, out) -> float | Float[Array, ' B']:
    """Returns the FLOPs of each row in the form that saves; here of all."""
    return self.flops()

  def outputs(self, params, model_state, batch):
    """Returns 'logits' `[B, E, O]`, 'flops' `[B]`, and `row_counts`."""
    logits, out = self.apply(params, model_state, batch)
    exits = out['exits'] if 'exits' in out else logits[None]
    flops = jnp.broadcast_to(self.row_flops(out), logits.shape[:1])
    result = {'logits': jnp.swapaxes(exits, 0, 1), 'flops': flops}
    return result | self.row_counts(out)

  def flops_of_steps(self, steps: Num[Array, ' B']) -> Float[Array, ' B']:
    """Returns the FLOPs of rows whose model takes the same for every step."""
    at_0, at_1 = (self.model.flops(self.info.input_shape, n) for n in (0, 1))
    return at_0 + (at_1 - at_0) * steps.astype(jnp.float32)

  def row_counts(self, out) -> dict[str, Shaped[Array, 'B ...']]:
    """Returns what a row took, by name: iterations, steps; here nothing."""
    return {}

  def cross_entropy(
    self, logits: Float[Array, '*B K'], batch: Batch
  ) -> Float[Array, '*B']:
    """Returns the cross-entropy of each row in nats, float32; a metric."""
    targets = jax.nn.one_hot(batch['label'], logits.shape[-1])
    return optax.softmax_cross_entropy(logits.astype(jnp.float32), targets)

  def metrics(self, forward: Forward) -> Metrics:
    """Returns accuracy and cross-entropy of rows with their own labels."""
    logits, batch = forward.logits, forward.batch
    correct = self.correct(logits.argmax(-1), batch)
    cross_entropy = self.cross_entropy(logits, batch)
    by_class = {} if forward.training else self.by_class(logits, batch)
    return by_class | {
      'accuracy': Average.from_values(correct, batch['mask']),
      'cross_entropy': Average.from_values(cross_entropy, batch['mask']),
    }

  def by_class(self, logits, batch) -> dict[str, Any]:
    """Returns the accuracy of each class and, of more than 5, of the best 5."""
    classes, mask = logits.shape[-1], batch['mask']
    metrics: dict[str, Any] = {}
    if classes > TOP:
      best = jax.lax.top_k(logits, TOP)[1]
      right = jax.vmap(self.correct, (1, None), 1)(best, batch).any(1)
      metrics[f'top{TOP}_accuracy'] = Average.from_values(right, mask)
    if not self.MULTI_LABEL:
      hits, label = self.correct(logits.argmax(-1), batch), batch['label']
      metrics[CLASS_ACCURACY] = ByClass.of(hits, mask, label, classes)
    return metrics

  def correct(
    self, predicted: Int[Array, ' B'], batch: Batch
  ) -> Bool[Array, ' B']:
    """Returns True for the rows whose predicted class is the label."""
    return predicted == batch['label']

  @property
  def label_names(self) -> tuple[str, ...]:
    """Class names, or '0', '1', ... if there are none; () for regression."""
    count = self.info.num_classes
    names = tuple(self.info.class_names) or tuple(map(str, range(count)))
    return names if count > 1 or self.MULTI_LABEL else ()


def checkpoint_fields(directory: str, names: Collection[str]) -> dict[str, Any]:
  """Reads the named fields of a published model or of a run; {} without one."""
  from model_lib import convert, convert_vit
  from train_lib.run_directory import CONFIG

  if not directory:
    return {}
  try:
    if convert_vit.is_vit(directory):
      checkpoint = convert_vit.load(directory)
      return checkpoint.fields | {'image_size': checkpoint.image_size}
    if convert.is_checkpoint(directory):
      fields = convert.read_sizes(directory)
    else:
      run = files.read_object(pathlib.Path(directory) / CONFIG)
      stated = run.get('dataset', {}) | run['model']
      fields = {name: stated[name] for name in names if name in stated}
    if {*fields} != {*names}:
      raise ValueError(f'expected {", ".join(names)}, got {", ".join(fields)}')
    return fields
  except (OSError, ValueError, KeyError, TypeError) as error:
    expected = f'the directory of a run or of a published model ({error})'
    raise ConfigError('model.from_checkpoint', directory, expected) from error


def with_image_size(config: dict[str, Any]) -> Any:
  """Returns the data set; an `image_size` of 0 becomes the checkpoint's."""
  data, model = config['dataset'], config['model']
  if not all(isinstance(group, fields.ConfigLike) for group in (data, model)):
    return data  # which is refused where it is checked
  directory = model.get('from_checkpoint', '')
  if directory and str(data.get('image_size')) == '0':
    saved = checkpoint_fields(directory, ('image_size',))
    return dict(data) | {'image_size': saved['image_size'] or 224}
  return data


def by_layer(scales: Iterable[str], model: Mapping[str, Any]) -> Iterator[str]:
  """Yields scales of a rate; 'layers->0.75' as one for each block of a ViT."""
  for scale in scales:
    pattern, _, decay = scale.rpartition('->')
    if pattern != 'layers':
      yield scale
      continue
    depth, by = model.get('depth', 0), float(decay)
    for i in range(depth):
      yield f'^encoder/block_{i}/->{by ** (depth - i):.6f}'
    yield f'^(tokens/|distillation$)->{by ** (depth + 1):.6f}'


def check_sizes(model: Any, info: DatasetInfo) -> None:
  """Raises ConfigError for a table of the model that the data exceed."""
  tables = 'vocab_size', 'max_positions', 'type_vocab_size'
  vocab, positions, kinds = (getattr(model, n, math.inf) for n in tables)
  length, types = info.input_shape[0], info.token_types
  # An index outside of a table is NaN.
  if vocab < info.vocab_size:
    expected = f'at least {info.vocab_size}, the vocabulary of the data'
    raise ConfigError('model.vocab_size', vocab, expected)
  if positions < length:
    expected = f'at most the {positions} positions of the model'
    raise ConfigError('dataset.max_length', length, expected)
  if 0 < kinds < types:
    expected = f'0, or at least {types}: the data are pairs of texts'
    raise ConfigError('model.type_vocab_size', kinds, expected)
