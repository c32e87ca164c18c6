"""States of a trainer, small and random, and checkpoints of them."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from train_lib import sharding
from train_lib.checkpoint import Checkpointer
from train_lib.train_step import TrainState

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def make_state(seed=0, devices=1, ema=False, dtype=jnp.float32, width=8):
  """A state as a trainer has it; its matrices are split over the devices."""
  mesh = sharding.make_mesh({'data': devices})
  rng = np.random.default_rng(seed)
  params = {
    'dense': {
      'kernel': jnp.asarray(rng.normal(size=(8, width)), dtype),
      'bias': jnp.asarray(rng.normal(size=(3,)), jnp.bfloat16),
    }
  }
  state = TrainState(
    step=jnp.int32(seed),
    params=params,
    model_state={'count': jnp.int32(seed), 'nothing': {}},
    opt_state=OPTIMIZER.init(params),
    rng=jax.random.key_data(jax.random.key(seed)),
    ema_params=jax.tree.map(lambda x: 2 * x, params) if ema else None,
    nonfinite=jnp.int32(0),
  )
  split, whole = sharding.by_rows(mesh), sharding.replicated(mesh)
  return jax.tree.map(
    lambda x: jax.device_put(x, split if x.ndim == 2 else whole), state
  )


def noise(step, size=256):
  """A state of one array."""
  values = np.random.default_rng(step).normal(size=size).astype(np.float32)
  return {'params': {'w': jnp.asarray(values)}, 'step': jnp.int32(step)}


def abstract(state):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )


def assert_identical(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def save_all(directory, steps, make=make_state, metrics=None, **options):
  """Saves the steps; `metrics` are by step."""
  with Checkpointer(directory, **options) as checkpointer:
    for step in steps:
      values = (metrics or {}).get(step)
      checkpointer.save(step, make(step), {'stage': f's{step}'}, values)
      checkpointer.wait()


def restored_step(directory, state=None):
  """The step that is restored, whose state must be that of `noise`."""
  with Checkpointer(directory) as checkpointer:
    found, saved = checkpointer.restore(noise(0) if state is None else state)
  size = found['params']['w'].size
  assert_identical(found, noise(saved.step, size))
  return saved.step


def folders(directory):
  return sorted(path.name for path in directory.iterdir())


def start_python(code, *arguments, flags='', **options):
  """Starts a process with its own devices, whose stdout is read."""
  return subprocess.Popen(
    [sys.executable, '-c', code, *map(str, arguments)],
    env=os.environ | {'XLA_FLAGS': flags},
    stdout=subprocess.PIPE, text=True, **options,
  )  # fmt: skip
