"""Throughput of the engine against the static form, at unlike tape lengths.

The model is Ti/16 at 224 pixels: with 196 input tokens, a tape of 100 is a
third of the sequence; the paper's tape of 10 saves at most 5 % of the FLOPs.
Run with -s to print the rows: pytest -m nightly -s <this file>.
"""

import functools

import jax
import numpy as np
import pytest

from eval_lib import benchmark
from eval_lib.report import print_table
from serve_lib.engine import Engine
from tests.adatape import serving_test as tapes

ROWS, BATCH, ROUNDS, SIDE = 256, 8, 5, 224
MODEL = dict(
  name='adatape.model:AdaTapeViT', variant='Ti/16', pool='gap', bank='input',
  bank_patch_size=8, tokens_per_step=5, query_dim=64,
)  # fmt: skip
DATA = dict(name='tests.fakes:FakeImages', image_size=SIDE, num_classes=1000)


def images():
  """Images of unlike brightness and contrast, whose tapes differ."""
  rng = np.random.default_rng(0)
  ramp = np.linspace(0, 1, SIDE)[:, None, None]
  for _ in range(ROWS):
    pixels = rng.random((SIDE, SIDE, 3)) ** rng.uniform(0.2, 6)
    yield (255 * pixels * ramp ** rng.uniform(0, 4)).astype(np.uint8)


@pytest.mark.nightly
@pytest.mark.parametrize(('steps', 'scale'), [(10, 3.0), (100, 12.0)])
def test_the_engine_is_no_slower_than_the_static_form(steps, scale):
  model = dict(MODEL, max_steps=steps, threshold=steps / 5)
  task, variables = tapes.build(model, DATA, noise=0.0)
  encoder = variables['params']['encoder']
  encoder['tape_norm']['scale'] *= scale  # so that the mean length is T / 2
  items = list(images())
  static = jax.jit(lambda params, image: task.apply(params, {}, image)[0])

  def run_static():
    for start in range(0, ROWS, BATCH):
      batch = {'image': np.stack(items[start : start + BATCH])}
      jax.device_get(static(variables['params'], batch))

  chain, policy = task.serve(variables, {})
  with Engine(chain, policy, policy.lengths, (4, BATCH)) as engine:
    answers = benchmark.checked(engine.predict(items))
    lengths = np.array([answer.tape_length for answer in answers])
    padded = np.take(policy.lengths, np.searchsorted(policy.lengths, lengths))
    flops = functools.partial(task.model.flops, task.info.input_shape)
    calls = [
      ('static', run_static, steps),
      ('engine', lambda: engine.predict(items), float(lengths.mean())),
    ]
    candidates = [
      benchmark.Candidate(
        name, functools.partial(benchmark.Call, run, ROWS),
        is_baseline=name == 'static', flops=flops(tape_length=length),
      )
      for name, run, length in calls
    ]  # fmt: skip
    case = {'T': steps, 'mean': round(float(lengths.mean()), 1)}
    with benchmark.Hosts() as hosts:
      rows, _ = benchmark.run(candidates, case, hosts, rounds=ROUNDS)
  limit = flops() / flops(tape_length=float(padded.mean()))
  print_table(
    benchmark.label(case), rows, f'limit with buckets: {limit:.3f}',
    ('candidate', 'seconds', 'speedup', 'limit', 'share'),
  )  # fmt: skip
  assert lengths.min() < lengths.max()
  assert 0.4 < lengths.mean() / steps < 0.6
  assert rows[-1]['speedup'].median > 0.8
