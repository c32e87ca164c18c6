"""The Task contract between an objective and the trainer.

A task owns a model and its losses; the trainer owns steps, devices and files.
Implement an objective as a `Task` and a config; all share one training loop.
"""

import abc
import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from annotated_types import Interval
from jaxtyping import Array, Float, Key, Shaped

from core import fields, registry
from core.errors import ConfigError
from dataset_lib.source import DatasetInfo
from eval_lib.metrics import Metric
from halting import older
from serve_lib.chain import NO_RUN, Chain, Policy, ServedRun
from train_lib.stages import Config

Batch = Mapping[str, Array]
Tree = Any  # a pytree of arrays: parameters, statistics, a teacher
Metrics = dict[str, Metric]
Weight = Annotated[float, Interval(ge=0.0, le=1e3)]  # of a loss


class Task(abc.ABC):
  """A model with its losses and metrics: `config`, `info` and `model`."""

  # Names of the knobs that `loss` reads; a stage may schedule no others.
  KNOBS: ClassVar[tuple[str, ...]] = ()

  def __init__(self, config: Config, info: DatasetInfo):
    self.config = config
    self.info = info
    self.model = self.build_model()

  @dataclasses.dataclass(frozen=True)
  class Loss:
    """Legal fields of `loss`, with their defaults; see `core.fields`."""

  @classmethod
  def validate_config(cls, config: dict[str, Any]) -> None:
    """Checks `loss` and `model`, and adds their defaults in place.

    Also runs for the `model` of each stage. Touches no device; it may open data
    for sizes of the model, e.g. a corpus' tokenizer.
    """
    config['loss'] = fields.check(cls.Loss, config['loss'], 'loss')

  @property
  def rows_together(self) -> int:
    """Consecutive rows of one device and micro-batch that the loss combines."""
    return 1

  @property
  def reads_every_step(self) -> bool:
    """True if the loss reads the steps that a `dynamic` model leaves out."""
    return False

  @abc.abstractmethod
  def build_model(self) -> Any:
    """Returns the Linen module; raises `ConfigError` on an illegal field."""

  @abc.abstractmethod
  def init(self, rng: Key[Array, '']) -> tuple[Tree, Tree]:
    """Returns (params, model_state), boxed with their logical axes."""

  def init_frozen(self) -> Tree:
    """Returns constants of the loss, e.g. a teacher."""
    return {}

  @abc.abstractmethod
  def normalizers(self, batch: Batch) -> dict[str, Float[Array, '']]:
    """Denominators over the WHOLE batch: micro-batch losses sum to its loss."""

  @abc.abstractmethod
  def loss(
    self,
    params: Tree,
    model_state: Tree,
    frozen: Tree,
    batch: Batch,
    norm: Mapping[str, Float[Array, '']],
    row_keys: Key[Array, ' B'],
    knobs: Mapping[str, Float[Array, '']],
  ) -> tuple[Float[Array, ''], tuple[Metrics, Tree]]:
    """Returns (loss, (metrics, model_state)) of a micro-batch.

    `norm` are the `normalizers` of the whole batch, all noise of a row comes
    from its key, `knobs` are traced scalars from the stage's schedules.
    """

  def loss_weight(self, name: str, knobs: Mapping[str, Any]) -> Any:
    """Returns a weight of `config.loss`, which a knob may override."""
    return knobs.get(name, self.config['loss'][name])

  def adaptive_loss(self, weight, cost, mask, norm, knobs) -> Array:
    """Returns a weight times the masked sum of costs over the examples.

    The ponder loss of Graves (2016), equation (14), and the tape loss of
    AdaTape (Algorithm 2). Costs and mask are `[B]`, or `[B, N]` per input of a
    row; `weight` names a field of `loss`; `norm` are the normalizers.
    """
    total = self.loss_weight(weight, knobs) * (cost * mask).sum()
    return total / norm['examples']

  @abc.abstractmethod
  def evaluate(self, params: Tree, model_state: Tree, batch: Batch) -> Metrics:
    """Returns metrics of a batch without noise, over rows with mask 1."""

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

  @abc.abstractmethod
  def features(
    self, params: Tree, model_state: Tree, batch: Batch
  ) -> Float[Array, 'B D']:
    """Returns the representation before the head, for few-shot evaluation."""

  def serve(
    self, variables: Tree, options: Mapping[str, Any], run: ServedRun = NO_RUN
  ) -> tuple[Chain, Policy]:
    """Returns (chain, policy) of `Engine(chain, policy, policy.lengths)`.

    `variables` are on one device, `options` the serving options of the family.
    """
    return self.prepare_serving(options, run)(variables)

  def prepare_serving(
    self, options: Mapping[str, Any], run: ServedRun = NO_RUN
  ) -> Callable[[Tree], tuple[Chain, Policy]]:
    """Checks the options; returns `serve` as a function of the variables."""
    expected = (
      'a task that is served, as classification is; pretraining is fine-tuned '
      'first, for example with configs/albert_act/glue.py'
    )
    name = f'{type(self).__module__}:{type(self).__name__}'
    raise ConfigError('task', name, expected)

  def save_assets(self, directory: pathlib.Path) -> None:
    """Writes files that serving needs, such as a tokenizer."""

  def flops(self) -> float:
    """Returns FLOPs of a forward pass (2 per multiply-add), NaN if unknown."""
    formula = getattr(self.model, 'flops', None)
    return formula(self.info.input_shape) if formula else math.nan


def build_task(config: Config, info: DatasetInfo, changes: Config = ()) -> Task:
  """Builds the configured task; a stage may change model keywords."""
  config = with_model(config, changes)
  task = registry.locate(config['task'], 'task', Task)(config, info)
  table = getattr(task.model, 'type_vocab_size', 0)
  if 0 < table < info.token_types:  # an index outside is NaN
    expected = f'0, or at least {info.token_types}: the data are pairs of texts'
    raise ConfigError('model.type_vocab_size', table, expected)
  return task


def with_model(config: Config, changes: Config) -> dict[str, Any]:
  """Returns the configuration as a dict, with `model` updated by `changes`."""
  plain = config.to_dict() if hasattr(config, 'to_dict') else dict(config)
  return plain | {'model': {**plain['model'], **dict(changes)}}


def complete_model(
  model: Mapping[str, Any], kind: type[nn.Module] = nn.Module
) -> dict[str, Any]:
  """Completes `config.model` with defaults; its module must subclass `kind`."""
  given = dict(model)
  name = given.pop('name', '')
  expected = f"'{kind.__module__}:{kind.__name__}' or a subclass"
  if kind is nn.Module:
    expected = "'package.module:Name' of a Linen module"
  module = registry.locate(name, 'model.name', kind, expected)
  set_by_task = ('num_classes', 'dtype')
  given = older.model_fields(given, module)
  complete = fields.check(module, given, 'model', without=set_by_task)
  with model_errors(complete):
    built: Any = registry.build(module, complete, num_classes=2)
  # The module may have set sizes that its variant determines.
  values = {field: getattr(built, field) for field in complete}
  values |= {
    field: complete[field]
    for field, hint in fields.hints(module).items()
    if fields.is_open(hint)
  }
  return {'name': str(name), **values}


def construct(config: Config, num_classes: int) -> Any:
  """Returns the Linen module of a complete configuration."""
  given = dict(config['model'])
  module = registry.locate(given.pop('name'), 'model.name', nn.Module)
  given = older.model_fields(given, module)
  dtype = jnp.dtype(config['dtype'])
  return registry.build(module, given, num_classes=num_classes, dtype=dtype)


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
