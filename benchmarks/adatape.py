"""Times AdaTape against ViT, and the cost of reading the tape.

  python -m benchmarks.adatape --variant=B/16 --batch=8
  python -m benchmarks.adatape --variant=Ti/16 --batch=4

One device, random images; large models take minutes on a CPU. 'reading' times
normalising the bank (without projecting it), and selecting, gathering and
merging bank tokens.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import linen as nn

from adatape.bank import SharedNorm
from adatape.tape import read
from adatape.task import TapeClassification
from benchmarks import command
from benchmarks.timing import Call, Candidate
from core.fields import flag
from dataset_lib.source import DatasetInfo
from launch.command_line import Positive
from model_lib import flops
from train_lib.classification import Classification
from train_lib.sharding import unbox
from train_lib.train_step import init_state, make_train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command.Timing):
  variant: str = flag('Ti, S, B or L, and pixels of a patch', 'B/16')
  batch: Positive = flag('images per call', 8, names='--batch --batch_size')
  image_size: Positive = flag('side of the square images, in pixels', 224)
  bank_size: Positive = flag('tokens in the learnable bank', 10_000)
  num_classes: Positive = flag('classes of the head', 1000)
  tape_mlp: Literal['', 'mlp', 'glu'] = flag("tape tokens' own network", '')
  phases: Literal['all', 'forward'] = flag('forward: no training steps', 'all')


def cases(flags: Any) -> Iterator[tuple[Any, list[Candidate]]]:
  for phase, prepare in phases(flags.phases == 'all').items():
    candidates, rows = [], flags.batch
    for bank in ('', 'learnable', 'input'):
      task = task_of(bank, flags)
      cost = task.model.flops(task.info.input_shape)
      make = functools.partial(prepare, task, rows)
      name = f'AdaTape {bank}' if bank else 'ViT'
      candidates.append(Candidate(name, make, is_baseline=not bank, flops=cost))
      if bank and prepare is prepare_forward:
        make = functools.partial(_prepare_reading, task, rows)
        candidates.append(Candidate(f'reading {bank}', make, baseline=name))
    yield {'phase': phase}, candidates


def phases(trains: bool) -> dict[str, Any]:
  """Returns functions that prepare a task for a number of rows, by phase."""
  last = {'train step': prepare_train_step} if trains else {}
  return {'forward': prepare_forward} | last


def task_of(bank: str, flags: Any) -> Classification:
  """Returns the task of an AdaTape with a bank, or of a ViT for ''."""
  side, classes = flags.image_size, flags.num_classes
  info = DatasetInfo('image', (side, side, 3), 'uint8', classes, (), 0)
  model = {'name': 'model_lib.vit:ViT', 'variant': flags.variant}
  if bank:
    model |= dict(name='adatape.model:AdaTapeViT', bank=bank)
    model |= dict(bank_size=flags.bank_size, tape_mlp=flags.tape_mlp)
  loss = {'label_smoothing': 0.0, 'tape_weight': 0.01}
  config: Any = dict(dtype=flags.dtype, model=model, loss=loss)
  return (TapeClassification if bank else Classification)(config, info)


def prepare_forward(task: Any, rows: int) -> Call:
  model, shape = task.model, (rows, *task.info.input_shape)
  images = jax.random.uniform(jax.random.key(0), shape, minval=-1.0)
  variables = nn.unbox(jax.jit(model.init)(jax.random.key(1), images[:1]))
  forward = jax.jit(lambda v, x: model.apply(v, x)[0])
  return Call(functools.partial(forward, variables, images))


def _prepare_reading(task: Any, rows: int) -> Call:
  model = task.model
  width, reading = model.width, model.reading()
  shape: tuple[int, ...] = (model.bank_size,)
  if model.bank == 'input':
    side = model.bank_patch_size
    shape = (rows, flops.num_patches(task.info.input_shape, side))
  bank_key, query_key = jax.random.split(jax.random.key(2))
  tokens = jax.random.normal(bank_key, (*shape, width))
  query = jax.random.normal(query_key, (rows, reading.query_dim))
  norm = SharedNorm()
  variables = nn.unbox(norm.init(jax.random.key(3), tokens, width))
  normalize: Any = functools.partial(norm.apply, variables)
  run = jax.jit(lambda b, q: read(b, q, reading, normalize=normalize).tokens)
  return Call(functools.partial(run, tokens, query))


def prepare_train_step(task: Any, rows: int) -> Call:
  """Prepares the library's training step with AdamW, the state donated."""
  rng, shape = np.random.default_rng(0), (rows, *task.info.input_shape)
  labels = rows, *task.info.label_shape
  batch = {
    'image': rng.integers(256, size=shape, dtype=np.uint8),
    'label': rng.integers(task.info.num_classes, size=labels, dtype=np.int32),
    'mask': np.ones(rows, np.float32),
  }
  schedule = optax.constant_schedule(1e-3)
  batch, optimizer = jax.device_put(batch), optax.adamw(schedule)
  state = jax.jit(lambda: unbox(init_state(task, optimizer, 0, 0.0)))()
  step = make_train_step(task, optimizer, schedule)
  lowered = jax.jit(step, donate_argnums=0).lower(state, {}, batch, {})
  compiled = lowered.compile()

  def run() -> Any:
    nonlocal state
    state, metrics = compiled(state, {}, batch, {})
    return state.step, metrics

  memory: Any = compiled.memory_analysis()
  return Call(run, columns={'temporary_bytes': memory.temp_size_in_bytes})


main = command.timed('adatape', __doc__, Flags, cases)

if __name__ == '__main__':
  raise SystemExit(main())
