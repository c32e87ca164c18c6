"""AdaTape timed against ViT, and the reading of the tape alone.

Used by `launch.benchmark`. One device, random inputs, nothing from disk.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from adatape.bank import SharedNorm
from adatape.model import AdaTapeViT
from adatape.tape import read
from adatape.task import TapeClassification
from dataset_lib.source import DatasetInfo
from eval_lib import timing
from model_lib import flops
from model_lib.vit import ViT
from train_lib.classification import Classification
from train_lib.sharding import unbox
from train_lib.train_step import init_state, make_train_step

BANKS = ('learnable', 'input')


@dataclasses.dataclass(frozen=True)
class Settings:
  """What is timed, and how often.

  Attributes:
    model: fields of both models: `variant`, or explicit sizes.
    tape: further fields of AdaTape, such as `bank_size`.
    image_size: side of the square images, in pixels.
    num_classes: width of the heads.
    batch_size: images per call.
    dtype: compute dtype.
    repeats: rounds that count.
    warmup: rounds before them.
  """

  model: Mapping[str, Any]
  tape: Mapping[str, Any]
  image_size: int = 224
  num_classes: int = 1000
  batch_size: int = 8
  dtype: str = 'float32'
  repeats: int = 10
  warmup: int = 2


@dataclasses.dataclass(frozen=True)
class Row:
  """One timed function.

  Attributes:
    phase: 'forward' or 'train step'.
    what: name of the model, or of the reading.
    seconds: of one call.
    ratio: of a model, its throughput over ViT's; of a reading, its time over
      that of the forward of its model.
    flops: of a model's forward per image, by formula; None for a reading.
    flop_limit: the ratio that FLOPs allow; None for a reading.
  """

  phase: str
  what: str
  seconds: timing.Estimate
  ratio: timing.Estimate
  flops: float | None
  flop_limit: float | None


def run(settings: Settings, phases: str = 'all') -> list[Row]:
  """Runs the `adatape` benchmark.

  Args:
    settings: what is timed.
    phases: 'all', or 'forward' without the training steps.

  Raises:
    ValueError: the model cannot be built; names the field.
  """
  models = build_models(settings)
  rows = compare(
    settings, 'forward', forward_functions(settings, models), models
  )
  if phases == 'all':
    functions = train_functions(settings, models)
    rows += compare(settings, 'train step', functions, models)
  return rows


def build_models(settings: Settings) -> dict[str, Any]:
  """ViT and AdaTape with each bank, by name."""
  common: dict[str, Any] = dict(
    num_classes=settings.num_classes,
    dtype=jnp.dtype(settings.dtype),
    **settings.model,
  )
  return {'ViT': ViT(**common)} | {
    f'AdaTape {bank}': AdaTapeViT(**common, **settings.tape, bank=bank)
    for bank in BANKS
  }


def _random_images(settings: Settings) -> Any:
  """Images `[B, Y, X, 3]` in [-1, 1], float32."""
  shape = (settings.batch_size, settings.image_size, settings.image_size, 3)
  return jax.random.uniform(jax.random.key(0), shape, minval=-1.0)


def forward_functions(
  settings: Settings, models: Mapping[str, Any]
) -> dict[str, Callable[[], Any]]:
  """A forward pass of each model, and AdaTape's readings alone.

  A reading is everything that the loop costs: normalising the bank, selection,
  gathering, merging. The projections that make the bank from the image are
  the bank's.
  """
  images = _random_images(settings)
  functions: dict[str, Callable[[], Any]] = {}
  for name, model in models.items():
    variables = nn.unbox(jax.jit(model.init)(jax.random.key(1), images[:1]))
    forward = jax.jit(lambda v, x, model=model: model.apply(v, x)[0])
    functions[name] = _bound(forward, variables, images)
  for bank in BANKS:
    functions[f'reading {bank}'] = _reading(settings, models[f'AdaTape {bank}'])
  return functions


def _reading(settings: Settings, model: Any) -> Callable[[], Any]:
  """The reading of one model on random bank and query tokens."""
  width, reading = model.width, model.reading()
  shape: tuple[int, ...] = (model.bank_size, width)
  if model.bank == 'input':
    image_shape = (settings.image_size, settings.image_size, 3)
    patches = flops.num_patches(image_shape, model.bank_patch_size)
    shape = (settings.batch_size, patches, width)
  bank_key, query_key = jax.random.split(jax.random.key(2))
  bank = jax.random.normal(bank_key, shape)
  query = jax.random.normal(query_key, (settings.batch_size, reading.query_dim))

  norm = SharedNorm()
  variables = nn.unbox(norm.init(jax.random.key(3), bank, width))

  def normalize(tokens, count):
    return norm.apply(variables, tokens, count)

  return _bound(
    jax.jit(lambda b, q: read(b, q, reading, normalize=normalize).tokens),
    bank,
    query,
  )


def train_functions(
  settings: Settings, models: Mapping[str, Any]
) -> dict[str, Callable[[], Any]]:
  """A whole training step of each model: the library's own, with AdamW."""
  side, rows = settings.image_size, settings.batch_size
  info = DatasetInfo(
    input_key='image',
    input_shape=(side, side, 3),
    input_dtype='uint8',
    num_classes=settings.num_classes,
    class_names=(),
    num_examples=rows,
  )
  rng = np.random.default_rng(0)
  batch = {
    'image': rng.integers(256, size=(rows, side, side, 3), dtype=np.uint8),
    'label': rng.integers(settings.num_classes, size=rows, dtype=np.int32),
    'mask': np.ones(rows, np.float32),
  }
  batch = jax.device_put(batch)
  tasks = {
    name: Classification if name == 'ViT' else TapeClassification
    for name in models
  }
  return {
    name: _train_step(_with_model(tasks[name], model, info), batch)
    for name, model in models.items()
  }


def _train_step(task: Any, batch: Mapping[str, Any]) -> Callable[[], Any]:
  optimizer = optax.adamw(1e-3)
  state = jax.jit(lambda: unbox(init_state(task, optimizer, 0, 0.0)))()
  step = jax.jit(
    make_train_step(task, optimizer, optax.constant_schedule(1e-3)),
    donate_argnums=0,
  )

  def call():
    nonlocal state
    state, metrics = step(state, {}, batch, {})
    return state.step, metrics

  return call


def _with_model(task_class: Any, model: Any, info: Any) -> Any:
  """A task whose model is given instead of built from a configuration."""

  class Given(task_class):
    def build_model(self):
      return model

  return Given({'loss': dict(label_smoothing=0.0, tape_weight=0.01)}, info)


def _bound(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
  return lambda: function(*arguments)


def compare(
  settings: Settings,
  phase: str,
  functions: Mapping[str, Callable[[], Any]],
  models: Mapping[str, Any],
) -> list[Row]:
  """Times the functions against each other."""
  timings = timing.measure(
    functions, repeats=settings.repeats, warmup=settings.warmup
  )
  shape = (settings.image_size, settings.image_size, 3)
  cost = {name: model.flops(shape) for name, model in models.items()}
  rows = []
  for name in functions:
    if name in models:
      ratio = timings.ratio('ViT', name)
    else:
      ratio = timings.ratio(name, name.replace('reading', 'AdaTape'))
    rows.append(
      Row(
        phase=phase,
        what=name,
        seconds=timings.estimate(name),
        ratio=ratio,
        flops=cost.get(name),
        flop_limit=cost['ViT'] / cost[name] if name in cost else None,
      )
    )
  return rows
