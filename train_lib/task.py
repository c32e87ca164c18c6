"""The Task contract between an objective and the trainer.

A task owns a model, terms and metrics; the trainer owns steps, devices, files.
"""

import abc
import collections
import contextlib
import dataclasses
import math
import pathlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
from jaxtyping import Array, Float, Key, Shaped

from core import fields, registry
from core.errors import ConfigError
from dataset_lib.source import DatasetInfo
from train_lib.phases import Config
from train_lib.terms import Batch, Forward, Metrics, Targets, Term, Tree, total


class ServedRun(NamedTuple):
  """A run that a task is served from; without a run the defaults."""

  directory: str = ''  # with its tokenizer and calibration
  step: int | None = None  # of the checkpoint, for messages
  lengths: tuple[int, ...] | None = None  # None: of the model or the data
  on_drift: Callable[[bool, dict[str, Any]], None] | None = None


NO_RUN = ServedRun()


class Task(abc.ABC):
  """A model, the terms of its loss, and metrics; `info` is that of the data."""

  # 'module:function' that serves the task, imported then, or ''.
  SERVE: ClassVar[str] = ''
  CERTIFICATE: ClassVar[str] = 'certificate'  # type of its evaluator
  # Pattern of the parameters with weight decay.
  DECAY: ClassVar[str] = r'(^|/)kernel$'
  # Metrics that terminal and figure show: title, unit, scale, {metric: label}.
  PANELS: ClassVar[tuple[tuple[str, str, float, dict[str, str]], ...]] = ()
  # Knobs that the loss reads; a phase may schedule no others.
  KNOBS: ClassVar[tuple[str, ...]] = ()
  MODEL_KNOBS: ClassVar[tuple[str, ...]] = ()  # keywords of the model

  def __init__(self, config: Config, info: DatasetInfo):
    self.config, self.info = config, info
    self.model = self.build_model()

  @dataclasses.dataclass(frozen=True)
  class Loss:
    """Legal fields of `loss`, with their defaults; see `core.fields`."""

  @classmethod
  def validate_config(cls, config: dict[str, Any]) -> None:
    """Checks `loss` and `model` (of each phase), adds defaults in place.

    Touches no device; may open data for sizes of the model, e.g. a tokenizer.
    """
    config['loss'] = fields.check(cls.Loss, config['loss'], 'loss')

  @property
  def rows_together(self) -> int:
    """Consecutive rows of one device and micro-batch that the loss combines."""
    return 1

  @property
  def scales(self) -> tuple[str, ...]:
    """Factors of rates that the data determine, as `optimizer.scales`."""
    return ()

  def check_training(self) -> None:
    """Raises ConfigError for a model that can only be evaluated."""

  @abc.abstractmethod
  def build_model(self) -> Any:
    """Returns the Linen module; raises `ConfigError` on an illegal field."""

  @abc.abstractmethod
  def example(self) -> Batch:
    """Returns a batch of one row, to initialize the model with."""

  @abc.abstractmethod
  def arguments(self, batch: Batch) -> tuple[Array, ...]:
    """Returns the positional arguments of the model."""

  @abc.abstractmethod
  def terms(self, forward: Forward) -> tuple[Term, ...]:
    """Returns the terms of the loss."""

  def metrics(self, forward: Forward) -> Metrics:
    """Returns metrics beside those that the terms name."""
    return {}

  def masks(self, batch: Batch) -> dict[str, Any]:
    """Returns what terms are averaged over, by name: float32, 0 for padding."""
    return {'rows': batch['mask']}

  def mixed(self, batch: Batch, row_keys: Any) -> tuple[Batch, Targets]:
    """Returns the batch that the model reads, and its targets."""
    return batch, ((1.0, batch),)

  def init(self, rng: Key[Array, '']) -> tuple[Tree, Tree]:
    """Returns (params, model_state), boxed with their logical axes."""
    variables = self.model.init(rng, *self.arguments(self.example()))
    model_state = {k: v for k, v in variables.items() if k != 'params'}
    return variables['params'], model_state

  def init_carry(self, rows: int) -> Tree:
    """Returns arrays `[rows, ...]` that a step gives to the next, or None."""
    return None

  def carried(self, carry: Tree, batch: Batch) -> Batch:
    """Returns the batch that the loss reads, with the carry as `['carry']`.

    A slot that goes on takes its data from the carry, any other its row of
    `batch`. The next carry is `out['carry']` of the model; evaluation has none.
    """
    return batch

  def init_frozen(self) -> Tree:
    """Returns constants of the loss, e.g. a teacher."""
    return {}

  def apply(
    self, params: Tree, model_state: Tree, batch: Batch, row_keys: Any = None,
    **options: Any,
  ) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """Runs the model; returns its (logits, out)."""
    from train_lib import model_check  # it imports tasks

    variables, inputs = {'params': params, **model_state}, self.arguments(batch)
    result = self.model.apply(variables, *inputs, row_keys=row_keys, **options)
    return model_check.pair(result, self.num_logits)

  @property
  def num_logits(self) -> int | None:
    """The last axis of logits that are one array; None for any."""
    return None

  def normalizers(self, batch: Batch) -> dict[str, Float[Array, '']]:
    """Denominators over the WHOLE batch: micro-batch losses sum to its loss."""
    masks = self.masks(batch).items()
    return {name: jnp.maximum(mask.sum(), 1.0) for name, mask in masks}

  def loss(
    self,
    params: Tree,
    model_state: Tree,
    frozen: Tree,
    batch: Batch,
    norm: Mapping[str, Any],
    row_keys: Key[Array, ' B'] | None,
    knobs: Mapping[str, Any],
  ) -> tuple[Float[Array, ''], tuple[Metrics, Tree, Tree]]:
    """Returns (loss, (metrics, model_state, next carry)) of a micro-batch.

    `norm`: `normalizers` of the whole batch; `row_keys`: the only noise, None
    in evaluation; `knobs`: traced scalars of the phase's schedules.
    """
    read, targets = self.mixed(batch, row_keys)
    options = {name: knobs[name] for name in self.MODEL_KNOBS if name in knobs}
    logits, out = self.apply(params, model_state, read, row_keys, **options)
    forward = Forward(
      logits=logits, out=out, batch=read, targets=targets,
      masks=self.masks(batch), settings={**self.config['loss'], **knobs},
      frozen=frozen, training=row_keys is not None,
    )  # fmt: skip
    loss, metrics = total(self.terms(forward), forward, norm)
    metrics |= self.metrics(forward)
    return loss, (metrics, model_state, out.get('carry'))

  def evaluate(self, params: Tree, model_state: Tree, batch: Batch) -> Metrics:
    """Returns metrics of a batch without noise, over rows with mask 1."""
    norm = self.normalizers(batch)
    return self.loss(params, model_state, {}, batch, norm, None, {})[1][0]

  def features(
    self, params: Tree, model_state: Tree, batch: Batch
  ) -> Float[Array, 'B D']:
    """Returns the representation before the head, for few-shot evaluation."""
    return self.apply(params, model_state, batch)[1]['features']

  def outputs(
    self, params: Tree, model_state: Tree, batch: Batch
  ) -> dict[str, Shaped[Array, 'B ...']]:
    """Returns per-row arrays; `logits` `[B, E, O]`: the last head predicts."""
    raise NotImplementedError(f'{type(self).__name__} has no outputs of rows')

  @property
  def head_layers(self) -> tuple[int, ...]:
    """The layer of each head in `outputs`; () if heads have no layers."""
    return ()

  def cheaper(self) -> tuple[dict[str, Any], ...]:
    """Changes of model fields that save more, in serving too; safest first."""
    return ()

  def serve(
    self, variables: Tree, options: Mapping[str, Any], run: ServedRun = NO_RUN
  ) -> tuple[Any, Any]:
    """Returns (chain, policy) of `Engine(chain, policy, policy.lengths)`."""
    return self.prepare_serving(options, run)(variables)

  def prepare_serving(
    self, options: Mapping[str, Any], run: ServedRun = NO_RUN
  ) -> Callable[[Tree], tuple[Any, Any]]:
    """Checks the family's options; returns `serve` as a function."""
    if self.SERVE:
      return pkgutil.resolve_name(self.SERVE)(self, options, run)
    expected = 'a task that is served; a pretrained model is fine-tuned first'
    raise ConfigError('task', registry.name_of(type(self)), expected)

  def save_assets(self, directory: pathlib.Path) -> None:
    """Writes files that serving needs, such as a tokenizer."""

  @property
  def has_formula(self) -> bool:
    """Whether `flops` is a formula of the model, not the compiler's count."""
    return callable(getattr(self.model, 'flops', None))

  def flops(self) -> float:
    """Returns FLOPs of a forward pass of a row (2 per multiply-add)."""
    if self.has_formula:
      return self.model.flops(self.info.input_shape)
    return self.counted_flops()

  def counted_flops(self) -> float:
    """Returns the compiler's count for a row, NaN if there is none.

    It has all operations of the masked form, the body of a loop once.
    """
    from train_lib import sharding

    example, shape = self.example(), self.info.input_shape
    short = example[self.info.input_key].shape
    rows = {  # as long as the rows of the data
      k: jnp.zeros((1, *shape), x.dtype) if x.shape == short else x
      for k, x in example.items()
    }
    boxed = jax.eval_shape(self.init, jax.random.key(0))
    lowered = jax.jit(self.apply).lower(*sharding.unbox(boxed), rows)
    return float((lowered.cost_analysis() or {}).get('flops', math.nan))


def build_task(config: Config, info: DatasetInfo, changes: Config = ()) -> Task:
  """Builds the configured task; a phase may change model keywords."""
  config = with_model(config, changes)
  return registry.locate(config['task'], 'task', Task)(config, info)


def with_model(config: Config, changes: Config) -> dict[str, Any]:
  """Returns the configuration as a dict, with `model` updated by `changes`."""
  plain = dict(config) if isinstance(config, dict) else config.to_dict()
  model = {**plain['model'], **dict(changes)}
  return plain | {'model': model} if changes else plain


class Model(collections.UserDict[str, Any]):
  """The checked fields of `config.model`, also as attributes.

  `module` is what they describe, with two classes; see `construct`.
  """

  def __init__(self, values: Mapping[str, Any], module: Any):
    super().__init__(values)
    self.module = module

  def __getattr__(self, name: str) -> Any:
    if name.startswith('_') or name == 'data':  # of a copy being made
      raise AttributeError(name)
    return getattr(ml_collections.FrozenConfigDict(self.data), name)


def complete_model(
  model: Mapping[str, Any],
  kind: type[nn.Module] = nn.Module,
  known: Callable[[Any, dict[str, Any]], dict[str, Any]] = lambda *_: {},
  takes_keys: bool = True,
) -> Model:
  """Completes `config.model` with `known(module, model)`, and defaults.

  Its module must subclass `kind`; `takes_keys`: the task calls it with
  `row_keys`.
  """
  from train_lib import model_check  # it imports tasks

  settings = dict(model)
  name = settings.pop('name', '')
  expected = f"'{registry.name_of(kind)}' or a subclass"
  if kind is nn.Module:
    expected = "'package.module:Name' of a Linen module"
  module = registry.locate(name, 'model.name', kind, expected)
  model_check.check_module(module, takes_keys)
  legal = fields.hints(module)
  items = known(module, settings).items()
  settings = {name: x for name, x in items if name in legal} | settings
  by_task = ('num_classes', 'dtype')
  complete = fields.check(module, settings, 'model', without=by_task)
  with model_errors(complete):
    built: Any = registry.build(module, complete, num_classes=2)
  # The module may have set sizes that its variant determines.
  sizes = {
    k: getattr(built, k) for k in complete if not fields.is_open(legal[k])
  }
  return Model({'name': str(name), **complete, **sizes}, built)


def construct(config: Config, num_classes: int) -> Any:
  """Returns the Linen module of a complete configuration."""
  sizes = dict(num_classes=num_classes, dtype=jnp.dtype(config['dtype']))
  model = config['model']
  if isinstance(model, Model):
    return model.module.clone(**sizes)
  settings = dict(model)
  module = registry.locate(settings.pop('name'), 'model.name', nn.Module)
  return registry.build(module, settings, **sizes)


@contextlib.contextmanager
def model_errors(model: Config) -> Iterator[None]:
  """Turns the errors of a module into `ConfigError` of `config.model`."""
  try:
    with fields.errors_under('model'):
      yield
  except ConfigError:
    raise
  except (TypeError, ValueError) as error:
    raise ConfigError('model', dict(model), str(error)) from error
