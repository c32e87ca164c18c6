"""Collectives of a program against those that it was written with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from model_lib import logical
from train_lib import compiled, sharding

LOOPS, SIZE = 6, 16


@pytest.fixture(scope='module')
def program():
  """A loop whose weights are split over 8 devices, like the rows."""
  mesh = sharding.make_mesh({'data': 1, 'fsdp': 8})

  def place(*names):
    return NamedSharding(mesh, PartitionSpec(*names))

  def step(weights, x):
    def layer(x, weight):
      return jnp.tanh(x @ weight), None

    return jax.lax.scan(layer, x, weights)[0].sum()

  weights = jax.ShapeDtypeStruct(
    (LOOPS, SIZE, SIZE), np.float32, sharding=place(None, 'fsdp')
  )
  x = jax.ShapeDtypeStruct((32, SIZE), np.float32, sharding=place('fsdp'))
  return compiled.inspect(jax.jit(step).lower(weights, x).compile())


def test_a_collective_in_a_loop_counts_as_often_as_it_runs(program):
  kinds = program.traffic()
  [gather] = [one for one in program.collectives if one.kind == 'all-gather']
  assert (gather.times, gather.sizes) in [
    (LOOPS, (SIZE * SIZE,)), (1, (LOOPS * SIZE * SIZE,))
  ]  # fmt: skip
  assert kinds['all-gather'][1] == LOOPS * SIZE * SIZE * 4
  assert kinds['all-reduce'] == (1, 4)


def product(x, weights):
  return x @ weights


def dense(x, weights):
  layer = logical.partitioned_dense(SIZE, None, None)
  params = {'kernel': weights, 'bias': jnp.zeros(SIZE)}
  return layer.apply({'params': params}, x)


@pytest.mark.parametrize(
  ('step', 'text'), [(product, 'x @ weights'), (dense, 'layer.apply(')]
)
def test_a_collective_names_the_line_that_causes_it(step, text):
  """Not the product that all dense layers share."""
  mesh = sharding.make_mesh({'data': 1, 'fsdp': 8})
  # The axis that is summed over is split: partial sums are added.
  x, weights = (
    jax.ShapeDtypeStruct(
      (SIZE, SIZE), np.float32, sharding=NamedSharding(mesh, spec)
    )
    for spec in (PartitionSpec(None, 'fsdp'), PartitionSpec('fsdp'))
  )
  found = compiled.inspect(jax.jit(step).lower(x, weights).compile())
  with open(__file__) as file:
    line = next(n for n, one in enumerate(file, 1) if text in one)
  where = found.traffic('where')
  assert next(iter(where)) == f'tests/train_lib/compiled_test.py:{line}'


def test_memory_and_flops(program):
  weights, rows = LOOPS * SIZE * SIZE // 8, 4 * SIZE
  assert program.arguments == 4 * (weights + rows)
  assert program.temporary > 0
  assert program.flops > 0


TEXT = """HloModule test

%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %a = (bf16[4]{0}, bf16[8]{0}) all-gather-start(%p), channel_id=3
  ROOT %d = bf16[8]{0} all-gather-done(%a)
}

%done (p: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %c = s32[]{:T(128)} constant(5)
  ROOT %l = pred[] compare(%p, %c), direction=LT
}

%dead (p: f32[8]) -> f32[8] {
  ROOT %x = f32[8]{0} all-reduce(%p), channel_id=9, to_apply=%sum
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %w = f32[8]{0} while(%p), condition=%done, body=%body
  %r = (f32[3,2]{1,0}, pred[]) all-reduce(%w, %q), channel_id=4, to_apply=%sum
  %s = (f32[8], f32[8], u32[], u32[]) collective-permute-start(%w), NAME
  %t = (f32[5], f32[7]) all-reduce-start(%w, %q), channel_id=6, to_apply=%sum
  %u = (f32[5], f32[7]) all-reduce-done(%t)
  ROOT %b = f32[8]{0} collective-permute-done(%s)
}
"""

TEXT = TEXT.replace('NAME', 'metadata={op_name="jit(f)/a"}')


def test_a_program_by_hand():
  found = [one[:4] for one in compiled.collectives(TEXT)]
  assert sorted(found) == [
    ('all-gather', (8,), 16, 5),
    ('all-reduce', (5, 7), 48, 1),
    ('all-reduce', (6, 1), 25, 1),
    ('collective-permute', (8,), 32, 1),
  ]
  found = [*compiled.collectives(TEXT)]
  [where] = [one.where for one in found if one.kind == 'collective-permute']
  assert where == 'jit(f)/a'
