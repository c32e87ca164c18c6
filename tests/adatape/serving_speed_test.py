"""Throughput of the engine against the static form, at unlike tape lengths.

Run with -s to print the rows: pytest -m nightly -s <this file>.
"""

import functools
import timeit

import jax
import numpy as np
import pytest

from serve_lib.chain import ServedRun
from serve_lib.engine import Engine
from tests.adatape import serving_test as tapes

ROWS, BATCH, ROUNDS, STEPS = 256, 32, 8, 20
MODEL = dict(
  name='adatape.model:AdaTapeViT', width=192, depth=12, mlp_dim=768,
  num_heads=3, patch_size=16, pool='gap', bank='input', bank_patch_size=4,
  tokens_per_step=10, max_steps=STEPS, threshold=2.0, query_dim=64,
)  # fmt: skip
DATA = dict(name='tests.fakes:FakeImages', image_size=64, num_classes=10)


def images():
  """Images of unlike brightness and contrast, whose tapes differ."""
  rng = np.random.default_rng(0)
  ramp = np.linspace(0, 1, 64)[:, None, None]
  for _ in range(ROWS):
    pixels = rng.random((64, 64, 3)) ** rng.uniform(0.2, 6)
    yield (255 * pixels * ramp ** rng.uniform(0, 4)).astype(np.uint8)


@pytest.mark.nightly
@pytest.mark.parametrize('scale', [3.0, 12.0])
def test_the_engine_is_no_slower_than_the_static_form(scale):
  task, variables = tapes.build(MODEL, DATA, noise=0.0)
  encoder = variables['params']['encoder']
  encoder['tape_norm']['scale'] *= scale  # larger scores, shorter tapes
  items = list(images())
  static = jax.jit(lambda params, image: task.apply(params, {}, image))

  def run_static():
    for start in range(0, ROWS, BATCH):
      batch = {'image': np.stack(items[start : start + BATCH])}
      jax.device_get(static(variables['params'], batch)[0])

  chain, policy = task.serve(
    variables, {}, ServedRun(lengths=tuple(range(4, STEPS, 4)))
  )
  with Engine(chain, policy, policy.lengths) as engine:
    lengths = [answer.tape_length for answer in engine.predict(items)]
    run_engine = functools.partial(engine.predict, items)
    run_static()
    seconds = [
      [timeit.timeit(run, number=1) for run in (run_static, run_engine)]
      for _ in range(ROUNDS)
    ]
  ratio = np.median([static / served for static, served in seconds])
  speeds = ROWS / np.median(seconds, axis=0)
  flops = functools.partial(task.model.flops, task.info.input_shape)
  limit = flops() / flops(tape_length=float(np.mean(lengths)))
  print(
    f'tape {min(lengths)} to {max(lengths)} of {STEPS}, mean '
    f'{np.mean(lengths):.1f}: static {speeds[0]:.0f}, engine {speeds[1]:.0f} '
    f'rows/s, ratio {ratio:.2f} of {limit:.2f} by FLOPs ({ratio / limit:.0%})'
  )
  assert min(lengths) < max(lengths)
  assert ratio > 0.8
