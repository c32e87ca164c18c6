"""Collectives of a train step: those of a ViT; none of the reading."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from adatape import tape
from adatape.reading import Reading, bank_drop
from tests.golden import adapter
from train_lib import compiled
from train_lib.build import Setup


def collectives(model):
  """{kind: sizes of its results}, and the sizes of the gradients."""
  flag = f'configs/adatape/digits.py:model={model}'
  config = adapter.load(flag, ['mesh.data=8', 'model.depth=2'], {})
  setup = Setup(config)
  with (
    jax.numpy_dtype_promotion('standard'),  # of optax
    jax.set_mesh(setup.mesh),
    contextlib.closing(setup.dataset.batches()) as batches,
  ):
    batch = setup.put(next(batches))
    step = setup.step(setup.phases[0], batch)[0]
  found = {}
  for one in compiled.inspect(step).collectives:
    found.setdefault(one.kind, []).extend(one.sizes)
  gradients = [leaf.size for leaf in jax.tree.leaves(setup.abstract.params)]
  if model != 'vit':
    # Scale and bias of the shared norm: the query's leading features apart.
    gradients += 2 * [config.model.query_dim]
  return found, gradients


MODELS = [
  'learn',
  pytest.param('vit', marks=pytest.mark.nightly),
  pytest.param('input', marks=pytest.mark.nightly),
]


@pytest.mark.parametrize('model', MODELS)
def test_a_step_reduces_gradients_and_scalars_only(model):
  found, gradients = collectives(model)
  assert list(found) == ['all-reduce']
  large = sorted(size for size in found['all-reduce'] if size > 1)
  assert large == sorted(gradients)


B, C, H, h = 16, 40, 16, 8
READING = Reading(3, 5, 2.2, h)
GATHERS = ('all-gather', 'all-to-all', 'collective-permute')


def case(dim):
  rng = np.random.default_rng(dim)
  bank = rng.normal(size=(C, H) if dim == 2 else (B, C, H)).astype('f')
  return bank, rng.normal(size=(B, h)).astype('f')


def forward(bank, query):
  return tape.read(bank, query, READING, stop_early=True)


def objective(bank, query):
  got = tape.read(bank, query, READING)
  return (got.tokens**2).sum() + got.loss.sum()


def put(mesh, bank, query):
  rows = NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))
  whole = NamedSharding(mesh, PartitionSpec())
  of_bank = whole if bank.ndim == 2 else rows
  return jax.device_put((bank, query), (of_bank, rows))


@pytest.mark.parametrize('dim', [2, 3])
def test_reads_without_communication(mesh, dim):
  placed = put(mesh, *case(dim))
  text = jax.jit(forward).lower(*placed).compile().as_text()
  assert not [word for word in (*GATHERS, 'all-reduce') if word in text]
  gradient = jax.jit(jax.grad(objective, (0, 1)))
  text = gradient.lower(*placed).compile().as_text()
  assert not [word for word in GATHERS if word in text]
  # Only the gradient of the common bank is summed over the devices.
  assert ('all-reduce' in text) == (dim == 2)


def test_bank_drop_draws_without_communication(mesh):
  keys = jax.device_put(
    jax.random.split(jax.random.key(0), B),
    NamedSharding(mesh, PartitionSpec(('data', 'fsdp'))),
  )
  drop = jax.jit(lambda keys: bank_drop(keys, 0.9, C, keep=30))
  step = drop.lower(keys).compile()
  assert not [word for word in GATHERS if word in step.as_text()]
  want = bank_drop(jax.device_get(keys), 0.9, C, keep=30)
  np.testing.assert_array_equal(step(keys), want)


def test_one_row_reads_on_a_mesh_of_many(mesh):
  bank, query = case(2)
  got = jax.jit(forward)(jnp.asarray(bank), jnp.asarray(query[:1]))
  assert got.tokens.shape == (1, 5, H)
