"""Rows of the reading split over 8 devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from adatape import tape
from adatape.reading import Reading, bank_drop

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


def both(bank, query):
  gradients = jax.grad(objective, (0, 1))(bank, query)
  return forward(bank, query), gradients


def put(mesh, bank, query):
  rows = NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))
  whole = NamedSharding(mesh, PartitionSpec())
  of_bank = whole if bank.ndim == 2 else rows
  return jax.device_put((bank, query), (of_bank, rows))


@pytest.mark.parametrize('dim', [2, 3])
def test_equals_the_unsharded_reading(mesh, dim):
  bank, query = case(dim)
  with jax.set_mesh(jax.make_mesh((1,), ('data',), devices=jax.devices()[:1])):
    want = jax.device_get(jax.jit(both)(bank, query))
  got = jax.device_get(jax.jit(both)(*put(mesh, bank, query)))
  np.testing.assert_array_equal(got[0].indices, want[0].indices)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), got, want
  )
  assert all(np.abs(gradient).max() > 1e-2 for gradient in want[1])


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
  compiled = drop.lower(keys).compile()
  assert not [word for word in GATHERS if word in compiled.as_text()]
  want = bank_drop(jax.device_get(keys), 0.9, C, keep=30)
  np.testing.assert_array_equal(compiled(keys), want)


def test_one_row_reads_on_a_mesh_of_many(mesh):
  bank, query = case(2)
  got = jax.jit(forward)(jnp.asarray(bank), jnp.asarray(query[:1]))
  assert got.tokens.shape == (1, 5, H)
