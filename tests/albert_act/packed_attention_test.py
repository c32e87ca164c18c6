"""Attention of packed tokens: its places, and its form of the softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from albert_act import packed_attention
from model_lib.attention import attend


@pytest.mark.parametrize(
  ('rows', 'least', 'most', 'expected'),
  [
    (1, 1, 16, [16]),  # one row has no other to wait for
    (1, 1, 200, [128]),
    (8, 1, 32, [16, 32]),
    (8, 1, 100, [16, 32, 48, 64, 96, 100]),
    (8, 256, 320, [32, 48, 64, 96, 128]),
    # With 257 tokens in 8 rows one of them has at least 33.
    (8, 257, 320, [48, 64, 96, 128]),
    (8, 769, 1000, [128]),
  ],
)
def test_a_row_has_places_for_as_many_queries_as_it_can_have(
  rows, least, most, expected
):
  assert packed_attention.places_for(rows, 128, least, most) == expected


@pytest.mark.parametrize(
  ('dtype', 'tolerance'), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)]
)
def test_the_late_division_gives_what_a_softmax_gives(dtype, tolerance):
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = ((3, 2, 3, 4), (3, 2, 6, 4), (3, 2, 6, 4))
  query, key, value = (
    (3 * jax.random.normal(*pair)).astype(dtype)
    for pair in zip(keys, shapes, strict=True)
  )
  # The last row has no valid token.
  valid = jnp.arange(6)[None] < jnp.array([6, 2, 0])[:, None]
  expected, _ = attend(query, key, value, valid)
  zeroed = jnp.where(valid[:, None, :, None], value, 0)
  out = packed_attention.weighted_values(query, key, zeroed, valid)
  assert out.dtype == dtype
  out, expected = (np.asarray(x, np.float32) for x in (out, expected))
  assert not out[2].any()
  np.testing.assert_allclose(out, expected, atol=tolerance, rtol=tolerance)


def test_large_scores_do_not_overflow():
  ones = jnp.full((1, 1, 2, 4), 100.0)
  value = jnp.arange(8.0).reshape(1, 1, 2, 4)
  valid = jnp.ones((1, 2), bool)
  out = packed_attention.weighted_values(ones, ones, value, valid)
  np.testing.assert_allclose(out[0, 0, 0], value[0, 0].mean(0), rtol=1e-6)
