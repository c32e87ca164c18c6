"""Settings of the reading, bank drop and query noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adatape.reading import Reading, bank_drop, query_noise


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('tokens_per_step', 0), ('max_steps', 0), ('query_dim', 0),
    ('max_steps', True), ('threshold', 0.0), ('threshold', float('nan')),
    ('query_update', 'mean'), ('loss', 'act'),
  ],
)  # fmt: skip
def test_errors_name_the_field(field, value):
  legal = dict(tokens_per_step=2, max_steps=4, threshold=2.0, query_dim=8)
  with pytest.raises(ValueError, match=f'{field}: expected'):
    Reading(**(legal | {field: value}))


def test_fixed_length_needs_one_bank_token_per_step():
  assert Reading(5, 4, float('inf'), 8).min_bank_size == 4
  assert Reading(5, 4, 2.0, 8).min_bank_size == 20


def test_bank_drop_has_its_rate_and_leaves_enough():
  keys = jax.random.split(jax.random.key(0), 16)
  dropped = np.asarray(bank_drop(keys, 0.1, 500, keep=50))
  assert abs(dropped.mean() - 0.1) < 0.02
  for rate in (0.5, 0.99):
    dropped = np.asarray(bank_drop(keys, rate, 40, keep=30))
    assert (~dropped).sum(1).min() >= 30
    assert dropped.any(1).all()
  assert not np.asarray(bank_drop(keys, 0.9, 30, keep=30)).any()


def test_bank_drop_draws_the_kept_tokens_near_the_limit():
  keys = jax.random.split(jax.random.key(0), 400)
  dropped = np.asarray(bank_drop(keys, 0.9, 40, keep=30))
  assert (dropped.sum(1) == 10).all()
  # Early and late tokens are dropped alike: 1/4 each, 5 deviations at most.
  share = dropped.mean(0)
  assert np.abs(share - 0.25).max() < 5 * (0.25 * 0.75 / 400) ** 0.5


def test_noise_has_its_scale_and_differs_between_rows():
  keys = jax.random.split(jax.random.key(0), 64)
  noisy = query_noise(keys, jnp.ones((64, 128)), 0.01) - 1.0
  np.testing.assert_allclose(noisy.std(), 0.01, rtol=0.05)
  assert not np.array_equal(noisy[0], noisy[1])
