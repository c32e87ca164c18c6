"""Noise of a row depends on its key alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_lib import row_random

KEYS = jax.random.split(jax.random.key(3), 6)


def test_noise_does_not_depend_on_the_batch():
  x = jnp.ones((6, 4, 5))
  whole = row_random.dropout(x, 0.5, KEYS)
  halves = [row_random.dropout(x[:3], 0.5, k) for k in (KEYS[:3], KEYS[3:])]
  np.testing.assert_array_equal(whole, jnp.concatenate(halves))


def test_keeps_the_expectation_and_the_rate():
  x = jnp.ones((6, 100, 50))
  got = row_random.dropout(x, 0.2, KEYS)
  # 30,000 draws: the standard error of the mean is 0.003.
  assert abs(float(got.mean()) - 1.0) < 0.012
  np.testing.assert_allclose(np.unique(got), [0.0, 1.25], rtol=1e-6)


def test_is_the_identity_without_keys_or_rate():
  x = jnp.ones((6, 2))
  assert row_random.dropout(x, 0.5, None) is x
  assert row_random.dropout(x, 0.0, KEYS) is x


@pytest.mark.parametrize('rate', [-0.1, 1.0])
def test_rate_out_of_range(rate):
  with pytest.raises(ValueError, match='dropout: expected a rate'):
    row_random.dropout(jnp.ones((6, 2)), rate, KEYS)


def test_uses_are_distinct_and_the_same_in_every_process():
  uses = ['a', 'b', 0, jnp.asarray(1)]
  drawn = [
    float(jax.random.uniform(row_random.fold_rows(KEYS, use)[0]))
    for use in uses
  ]
  assert len(set(drawn)) == 4
  # crc32('a'), not Python's hash, which differs between processes.
  same = jax.random.fold_in(KEYS[0], 0xE8B7BE43)
  assert drawn[0] == float(jax.random.uniform(same))
