"""Candidates of `launch.benchmark adatape`: AdaTape, ViT, and reading a tape.

One device, random images. A reading is everything that the loop of the tape
costs: normalising the bank, selection, gathering, merging. The projections that
make the bank from the image belong to the bank.
"""

import functools
from collections.abc import Mapping
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
from eval_lib import benchmark
from eval_lib.hosts import Call, Candidate, Case, Hosts
from model_lib import flops
from model_lib.vit import ViT
from train_lib.classification import Classification
from train_lib.sharding import unbox
from train_lib.train_step import init_state, make_train_step

BANKS = ('learnable', 'input')
FORWARD, TRAIN = 'forward', 'train step'


def check(settings: Mapping[str, Any]) -> None:
  """Builds the models; raises ValueError, naming the field, if one is wrong."""
  for name in ('ViT', *BANKS):
    build_model(name, settings)


def tables(settings: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
  """Runs the benchmark; see `launch.benchmark`.

  Args:
    settings: the flags of the command.
  """
  phases = (FORWARD, TRAIN) if settings['phases'] == 'all' else (FORWARD,)
  cases = [{'phase': phase} for phase in phases]
  with Hosts() as hosts:
    rows = benchmark.run(
      candidates(settings), cases, hosts,
      rounds=settings['rounds'], warmup=settings['warmup'],
    )  # fmt: skip
  return {'': rows}


def candidates(settings: Mapping[str, Any]) -> list[Candidate]:
  """The models, and the reading of each bank alone."""
  shape = (settings['image_size'], settings['image_size'], 3)

  def model(name: str, bank: str) -> Candidate:
    cost = build_model(bank, settings).flops(shape)
    return Candidate(
      name, make_model, {'bank': bank, 'settings': settings},
      is_baseline=bank == 'ViT', flops=(cost, cost),
    )  # fmt: skip

  return [
    model('ViT', 'ViT'),
    *(model(f'AdaTape {bank}', bank) for bank in BANKS),
    *(
      Candidate(
        f'reading {bank}', make_reading, {'bank': bank, 'settings': settings},
        baseline=f'AdaTape {bank}',
      )
      for bank in BANKS
    ),
  ]  # fmt: skip


def fields(bank: str, settings: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of a model: of AdaTape with a bank, or of a ViT for 'ViT'."""
  variant = {'variant': settings['variant']}
  if bank == 'ViT':
    return variant
  return variant | {'bank_size': settings['bank_size'], 'bank': bank}


def build_model(bank: str, settings: Mapping[str, Any]) -> Any:
  """Builds an AdaTape with a bank, or a ViT for 'ViT'."""
  model = ViT if bank == 'ViT' else AdaTapeViT
  return model(
    num_classes=settings['num_classes'],
    dtype=jnp.dtype(settings['dtype']),
    **fields(bank, settings),
  )


def make_model(case: Case, bank: str, settings: Mapping[str, Any]) -> Call:
  """Prepares a forward pass or a training step on random images."""
  if case['phase'] == TRAIN:
    return train_step(_task(bank, settings), _batch(settings))
  model, images = build_model(bank, settings), _random_images(settings)
  variables = nn.unbox(jax.jit(model.init)(jax.random.key(1), images[:1]))
  forward = jax.jit(lambda v, x: model.apply(v, x)[0])
  return Call(functools.partial(forward, variables, images))


def make_reading(
  case: Case, bank: str, settings: Mapping[str, Any]
) -> Call | None:
  """Prepares the reading of random bank and query tokens."""
  if case['phase'] != FORWARD:
    return None
  model = build_model(bank, settings)
  width, reading = model.width, model.reading()
  rows, side = settings['batch'], settings['image_size']
  shape: tuple[int, ...] = (model.bank_size, width)
  if bank == 'input':
    patches = flops.num_patches((side, side, 3), model.bank_patch_size)
    shape = (rows, patches, width)
  bank_key, query_key = jax.random.split(jax.random.key(2))
  tokens = jax.random.normal(bank_key, shape)
  query = jax.random.normal(query_key, (rows, reading.query_dim))
  norm = SharedNorm()
  variables = nn.unbox(norm.init(jax.random.key(3), tokens, width))

  def normalize(tokens: Any, count: int) -> Any:
    return norm.apply(variables, tokens, count)

  run = jax.jit(lambda b, q: read(b, q, reading, normalize=normalize).tokens)
  return Call(functools.partial(run, tokens, query))


def train_step(task: Any, batch: Mapping[str, Any]) -> Call:
  """Prepares the library's training step with AdamW, the state donated."""
  optimizer = optax.adamw(1e-3)
  state = jax.jit(lambda: unbox(init_state(task, optimizer, 0, 0.0)))()
  step = make_train_step(task, optimizer, optax.constant_schedule(1e-3))
  batch = jax.device_put(dict(batch))
  compiled = (
    jax.jit(step, donate_argnums=0).lower(state, {}, batch, {}).compile()
  )

  def run() -> Any:
    nonlocal state
    state, metrics = compiled(state, {}, batch, {})
    return state.step, metrics

  memory: Any = compiled.memory_analysis()
  return Call(run, columns={'temporary_bytes': memory.temp_size_in_bytes})


def _random_images(settings: Mapping[str, Any]) -> Any:
  """Images `[B, Y, X, 3]` in [-1, 1], float32."""
  side = settings['image_size']
  shape = (settings['batch'], side, side, 3)
  return jax.random.uniform(jax.random.key(0), shape, minval=-1.0)


def _task(bank: str, settings: Mapping[str, Any]) -> Any:
  side = settings['image_size']
  info = DatasetInfo(
    input_key='image', input_shape=(side, side, 3), input_dtype='uint8',
    num_classes=settings['num_classes'], class_names=(),
    num_examples=settings['batch'],
  )  # fmt: skip
  is_vit = bank == 'ViT'
  name = 'model_lib.vit:ViT' if is_vit else 'adatape.model:AdaTapeViT'
  config = dict(
    dtype=settings['dtype'],
    model=dict(name=name, **fields(bank, settings)),
    loss=dict(label_smoothing=0.0, tape_weight=0.01),
  )
  return (Classification if is_vit else TapeClassification)(config, info)


def _batch(settings: Mapping[str, Any]) -> dict[str, np.ndarray]:
  rows, side = settings['batch'], settings['image_size']
  rng = np.random.default_rng(0)
  return {
    'image': rng.integers(256, size=(rows, side, side, 3), dtype=np.uint8),
    'label': rng.integers(settings['num_classes'], size=rows, dtype=np.int32),
    'mask': np.ones(rows, np.float32),
  }
