"""The step that pretrains an ALBERT, timed with and without halting.

Used by `launch.benchmark`. One device, random tokens and parameters: the masked
form takes the same time whichever tokens halt.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from albert_act.model import AlbertPretraining
from albert_act.pretraining import Pretraining
from dataset_lib.source import DatasetInfo
from eval_lib import timing
from launch.albert_benchmark import VOCAB_SIZE, Settings
from model_lib import pondering
from train_lib.sharding import unbox
from train_lib.train_step import init_state, make_train_step


@dataclasses.dataclass(frozen=True)
class TrainRow:
  """One timed training step of pretraining.

  Attributes:
    what: name of the model.
    iterations: the most.
    seconds: of one step.
    slow_down: over fixed depth with the same rematerialisation.
    temporary_bytes: of the compiled step.
  """

  what: str
  iterations: int
  seconds: timing.Estimate
  slow_down: timing.Estimate
  temporary_bytes: int


def train(settings: Settings, batch: int) -> list[TrainRow]:
  """Times the pretraining step with and without halting and remat."""
  most = AlbertPretraining(variant=settings.variant).max_iterations
  rows: list[TrainRow] = []
  for chunk in (0, pondering.balanced_chunk(most)):
    steps, memory = {}, {}
    for name, rule in (('fixed', ''), ('halting', 'act')):
      steps[name], memory[name] = _train_step(settings, batch, rule, chunk)
    timings = timing.measure(
      steps, repeats=settings.repeats, warmup=settings.warmup
    )
    note = f', rematerialised by {chunk}' if chunk else ''
    rows += [
      TrainRow(
        name + note,
        most,
        timings.estimate(name),
        timings.ratio(name, 'fixed'),
        memory[name],
      )
      for name in steps
    ]
  return rows


def _train_step(
  settings: Settings, batch_size: int, rule: str, chunk: int
) -> tuple[Callable[[], Any], int]:
  length, words = settings.length, settings.length // 5
  info = DatasetInfo(
    input_key='tokens', input_shape=(length,), input_dtype='int32',
    num_classes=2, class_names=(), num_examples=batch_size,
    vocab_size=VOCAB_SIZE,
  )  # fmt: skip
  config = dict(
    dtype=settings.dtype,
    model=dict(
      name='albert_act.model:AlbertPretraining', variant=settings.variant,
      vocab_size=VOCAB_SIZE, max_positions=length, halting=rule,
      remat_chunk=chunk,
    ),
    loss=dict(ponder_weight=5e-4, sop_weight=1.0),
    dataset=dict(mask_share=0.2),
  )  # fmt: skip
  task = Pretraining(config, info)
  rng = np.random.default_rng(0)

  def ids(*shape: int) -> np.ndarray:
    return rng.integers(1, VOCAB_SIZE, shape, dtype=np.int32)

  batch = jax.device_put(
    {
      'tokens': ids(batch_size, length),
      'token_types': np.zeros((batch_size, length), np.int32),
      'length': np.full(batch_size, length, np.int32),
      'mlm_positions': ids(batch_size, words) % length,
      'mlm_labels': ids(batch_size, words),
      'mlm_weights': np.ones((batch_size, words), np.float32),
      'label': ids(batch_size) % 2,
      'mask': np.ones(batch_size, np.float32),
    }
  )
  optimizer = optax.adamw(1e-3)
  state = jax.jit(lambda: unbox(init_state(task, optimizer, 0, 0.0)))()
  compiled = (
    jax.jit(
      make_train_step(task, optimizer, optax.constant_schedule(1e-3)),
      donate_argnums=0,
    )
    .lower(state, {}, batch, {})
    .compile()
  )

  def call() -> Any:
    nonlocal state
    state, metrics = compiled(state, {}, batch, {})
    return state.step, metrics

  memory: Any = compiled.memory_analysis()
  return call, memory.temp_size_in_bytes
