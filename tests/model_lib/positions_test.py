"""Fixed positions against hand values and a plain loop."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_lib import tokens


def test_sincos1d_equals_loop():
  got = tokens.sincos1d(np.array([0.0, 1.0, 7.0], np.float32), 8)
  for row, position in zip(got, (0, 1, 7), strict=True):
    for i in range(4):
      angle = position * 10_000 ** (-i / 3)
      np.testing.assert_allclose(row[i], math.sin(angle), atol=1e-5)
      np.testing.assert_allclose(row[4 + i], math.cos(angle), atol=1e-5)


def test_sincos2d_numbers_patches_row_by_row():
  got = tokens.sincos2d(2, 3, 16)
  assert got.shape == (6, 16)
  columns = tokens.sincos1d(np.arange(3, dtype=np.float32), 8)
  rows = tokens.sincos1d(np.arange(2, dtype=np.float32), 8)
  np.testing.assert_array_equal(got[5, :8], columns[2])
  np.testing.assert_array_equal(got[5, 8:], rows[1])
  assert len(np.unique(np.asarray(got).round(4), axis=0)) == 6


@pytest.mark.parametrize('width', [2, 7])
def test_illegal_width_in_one_dimension(width):
  with pytest.raises(ValueError, match='width: expected an even number'):
    tokens.sincos1d(np.zeros(1, np.float32), width)


def test_illegal_width_in_two_dimensions():
  with pytest.raises(ValueError, match='width: expected a multiple of 4'):
    tokens.sincos2d(2, 2, 10)


def test_learned_positions_add_one_vector_each():
  x = jnp.ones((2, 3, 4))
  model = tokens.LearnedPositions()
  params = model.init(jax.random.key(1), x)
  added = model.apply(params, x) - x
  np.testing.assert_allclose(added[0], added[1], atol=1e-6)
  spread = jax.jit(model.init)(jax.random.key(1), jnp.ones((1, 100, 100)))
  embedding = jax.tree.leaves(spread)[0]
  assert abs(float(embedding.std()) - 0.02) < 0.001
