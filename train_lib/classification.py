"""Classification of images or token sequences by any model.

The model is called as `model(inputs, row_keys=...) -> (logits, out)`;
subclasses add the losses of an adaptive mechanism from `out`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Interval
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from core import files
from core.errors import ConfigError
from eval_lib import calibration
from eval_lib.metrics import CLASS_ACCURACY, Average, ByClass
from serve_lib.chain import NO_RUN, ServedRun
from serve_lib.decisions import ClassifierPolicy, OneStage
from serve_lib.items import ItemReader, images, token_rows
from train_lib import mixup
from train_lib.task import Batch, Task, complete_model, construct

TOP = 5  # classes of the metric `top5_accuracy`
RowLoss = Callable[[Any], Any]  # from logits `[B, K]` to losses `[B]`


class Classification(Task):
  """Softmax cross-entropy, with label smoothing and mixup as options.

  `model.name` is `'module:Class'` of a Linen module with the other fields.
  """

  MODEL: ClassVar[type[nn.Module]] = nn.Module  # required base class
  MULTI_LABEL: ClassVar[bool] = False  # rows of the data have several labels

  @dataclasses.dataclass(frozen=True)
  class Loss:
    """Legal fields of `loss`."""

    label_smoothing: Annotated[float, Interval(ge=0.0, le=0.999)] = 0.0
    # Parameter of the Beta distribution of `train_lib.mixup`; 0 mixes nothing.
    mixup: Annotated[float, Interval(ge=0.0, le=100.0)] = 0.0

  @classmethod
  def validate_config(cls, config: dict[str, Any]) -> None:
    """Checks `loss` and `model`; see `Task.validate_config`."""
    super().validate_config(config)
    config['model'] = complete_model(config['model'], cls.MODEL)
    alpha = config['loss'].get('mixup', 0.0)
    if alpha and 'image_size' not in config['dataset']:
      raise ConfigError('loss.mixup', alpha, '0 for inputs other than images')

  @property
  def rows_together(self) -> int:
    """Two rows of a mixup pair; see `Task.rows_together`."""
    return mixup.PAIR if self.mixes else 1

  @property
  def mixes(self) -> bool:
    """True if training mixes images, by the field `loss.mixup`."""
    return self.config['loss'].get('mixup', 0.0) > 0.0

  def build_model(self) -> Any:
    """Returns the module of `config.model`; checks that it fits the data."""
    most = self.info.max_labels
    if bool(most) != self.MULTI_LABEL:
      expected = '>= 1' if self.MULTI_LABEL else '0, one label a row,'
      expected += f' for {type(self).__name__}'
      raise ConfigError('dataset.max_labels', most, expected)
    model = construct(self.config, self.info.num_classes)
    size = getattr(model, 'vocab_size', math.inf)
    if size < self.info.vocab_size:
      expected = f'at least the {self.info.vocab_size} ids of the data'
      raise ConfigError('model.vocab_size', size, expected)
    return model

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
    given = np.array([self.info.mean, self.info.std], np.float32)
    mean, std = given.reshape(2, 1, 1, 1, -1)
    return inputs.astype(jnp.float32) / (255 * std) - mean / std

  def arguments(self, batch: Batch) -> tuple[Array, ...]:
    """Returns the positional arguments of the model."""
    return (self.inputs(batch),)

  def init(self, rng):
    """Initializes with a batch of one; see `Task.init`."""
    variables = self.model.init(rng, *self.arguments(self.example()))
    model_state = {k: v for k, v in variables.items() if k != 'params'}
    return variables['params'], model_state

  def apply(self, params, model_state, batch, row_keys=None, **options):
    """Runs the model; returns (logits `[B, num_classes]`, out)."""
    variables = {'params': params, **model_state}
    inputs = self.arguments(batch)
    return self.model.apply(variables, *inputs, row_keys=row_keys, **options)

  def row_weights(self, batch: Batch) -> Float[Array, 'B ...']:
    """Returns the weights of the cross-entropies: 1 for rows, 0 for padding."""
    return batch['mask']

  def normalizers(self, batch):
    """Returns the sum of the weights of the whole batch, at least 1."""
    return {'examples': jnp.maximum(self.row_weights(batch).sum(), 1.0)}

  def loss(self, params, model_state, frozen, batch, norm, row_keys, knobs):
    """Returns the weighted mean of `row_losses` plus `extra_loss`.

    In training with mixup the model reads mixed images. Cross-entropy is linear
    in the targets, so those of both labels are mixed instead of the labels;
    metrics compare with the label of the row itself.
    """
    read, entropy = self._mixed(batch, row_keys)
    logits, out = self.apply(params, model_state, read, row_keys)
    rows, metrics = self.row_losses(logits, out, read, entropy, frozen, knobs)
    loss = (rows * self.row_weights(batch)).sum() / norm['examples']
    extra, more = self.extra_loss(out, batch, norm, knobs)
    metrics |= more
    metrics |= self.quality(logits, self.cross_entropy(logits, batch), batch)
    if row_keys is None:
      metrics |= self.eval_metrics(out, batch) | self.by_class(logits, batch)
    return loss + extra, (metrics, model_state)

  def _mixed(self, batch: Batch, row_keys: Any) -> tuple[Batch, RowLoss]:
    """Returns the batch to read, and `smoothed` with its labels."""
    if row_keys is None or not self.mixes:
      return batch, lambda logits: self.smoothed(logits, batch)
    share = mixup.shares(row_keys, batch['mask'], self.config['loss']['mixup'])
    images, own = self.inputs(batch), share[:, None, None, None]
    mixed = own * images + (1.0 - own) * mixup.partners(images)
    other = {**batch, 'label': mixup.partners(batch['label'])}

    def entropy(logits: Array) -> Array:
      losses = [self.smoothed(logits, one) for one in (batch, other)]
      return share * losses[0] + (1.0 - share) * losses[1]

    return {**batch, self.info.input_key: mixed}, entropy

  def row_losses(
    self, logits, out, batch: Batch, entropy: RowLoss, frozen, knobs
  ) -> tuple[Float[Array, 'B ...'], dict[str, Any]]:
    """Returns the loss of each row, and metrics; here the cross-entropy.

    `entropy(logits)` is the cross-entropy of each row of `[B, K]` logits with
    the targets, which mixup mixes; `batch` has the inputs that the model read.
    """
    return entropy(logits), {}

  def extra_loss(self, out, batch, norm, knobs) -> tuple[Array, dict[str, Any]]:
    """Returns loss and metrics from `out`; here zero and no metrics."""
    return jnp.zeros(()), {}

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
    none, one = (self.model.flops(self.info.input_shape, n) for n in (0, 1))
    return none + (one - none) * steps.astype(jnp.float32)

  def row_counts(self, out) -> dict[str, Shaped[Array, 'B ...']]:
    """Returns what a row took, by name: iterations, steps; here nothing."""
    return {}

  def eval_metrics(self, out, batch) -> dict[str, Any]:
    """Returns metrics from `out` that need communication; none in training."""
    return {}

  def cross_entropy(
    self, logits: Float[Array, '*B K'], batch: Batch
  ) -> Float[Array, '*B']:
    """Returns the cross-entropy of each row in nats, float32; a metric."""
    targets = jax.nn.one_hot(batch['label'], logits.shape[-1])
    return optax.softmax_cross_entropy(logits.astype(jnp.float32), targets)

  def smoothed(
    self, logits: Float[Array, '*B K'], batch: Batch
  ) -> Float[Array, 'B ...']:
    """Returns `cross_entropy` with smoothed labels, which training lowers."""
    losses = self.cross_entropy(logits, batch)
    share = self.config['loss'].get('label_smoothing', 0.0)
    if not share or self.info.num_classes == 1:
      return losses
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return (1 - share) * losses - share * logs.mean(-1)

  def quality(self, logits, entropy, batch) -> dict[str, Any]:
    """Returns accuracy and cross-entropy of the real rows."""
    correct = self.correct(logits.argmax(-1), batch)
    return {
      'accuracy': Average.from_values(correct, batch['mask']),
      'cross_entropy': Average.from_values(entropy, batch['mask']),
    }

  def by_class(self, logits, batch) -> dict[str, Any]:
    """Returns the accuracy of each class and, of more than 5, of the best 5."""
    classes, found = logits.shape[-1], dict[str, Any]()
    if logits.ndim != 2 or classes == 1:
      return found
    if classes > TOP:
      best = jax.lax.top_k(logits, TOP)[1]
      right = jax.vmap(self.correct, (1, None), 1)(best, batch).any(1)
      found[f'top{TOP}_accuracy'] = Average.from_values(right, batch['mask'])
    if not self.MULTI_LABEL:
      given = self.correct(logits.argmax(-1), batch), batch['mask']
      found[CLASS_ACCURACY] = ByClass.of(*given, batch['label'], classes)
    return found

  def correct(
    self, predicted: Int[Array, ' B'], batch: Batch
  ) -> Bool[Array, ' B']:
    """Returns True for the rows whose predicted class is the label."""
    return predicted == batch['label']

  def evaluate(self, params, model_state, batch):
    """Returns quality and the mechanism's metrics, without noise."""
    norm = self.normalizers(batch)
    return self.loss(params, model_state, {}, batch, norm, None, {})[1][0]

  def features(self, params, model_state, batch):
    """Returns `out['features']` of the model."""
    return self.apply(params, model_state, batch)[1]['features']

  @property
  def label_names(self) -> tuple[str, ...]:
    """Class names, or '0', '1', ... if there are none; () for regression."""
    count = self.info.num_classes
    names = tuple(self.info.class_names) or tuple(map(str, range(count)))
    return names if count > 1 or self.MULTI_LABEL else ()

  def prepare_serving(self, options, run=NO_RUN):
    """Serves the model as one stage, without options."""
    for name, value in options.items():
      raise ConfigError(f'serve.{name}', value, 'no options for this model')
    if run.lengths is not None:
      raise ConfigError('lengths', run.lengths, 'none for inputs of one size')
    return functools.partial(self.one_stage, self.item_reader(), (1,), run)

  def one_stage(
    self, reader: Any, lengths: Sequence[int], run: ServedRun, variables: Any
  ) -> tuple[OneStage, ClassifierPolicy]:
    """Returns chain and policy of a model without exits.

    The temperature is that of calibration.json, if there is one.
    """
    file = calibration.CalibrationFile(run.directory, run.step)
    file.check_parameters(variables)

    def apply(variables: Any, batch: Batch) -> Array:
      model_state = variables.get('model_state', {})
      return self.apply(variables['params'], model_state, batch)[0]

    chain = OneStage(apply, variables, reader)
    given = chain, reader, self.label_names, lengths
    known: Any = dict(several=self.MULTI_LABEL)
    known['temperatures'] = file.temperatures(1, self.head_layers)
    return chain, ClassifierPolicy(*given, **known)

  def item_reader(self, length: int = 1) -> ItemReader:
    """Returns the reader of items, images or token ids of one length bucket."""
    info = self.info
    if info.input_key == 'tokens':
      return token_rows(info.input_shape[0], info.vocab_size, length)
    if info.input_key != 'image':
      raise ConfigError('task', info.input_key, 'images, tokens or texts')
    size, given = info.input_shape[0], self.config['dataset']
    # A data set that does not say has no central crop.
    known = {'resize_small': size} | dict(given) | dict(info.preprocessing)
    limit = given.get('max_pixels', files.MAX_PIXELS)
    return images(size, known['resize_small'], length, limit)
