"""Packed tokens and their attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from albert_act import compaction, packed_attention
from albert_act.packed_attention import Packed, PackedAttention
from model_lib.attention import attend, join_heads


@pytest.mark.parametrize(
  ('rows', 'length'), [(1, 1), (1, 5), (4, 4), (1, 128), (32, 16), (8, 512)]
)
def test_sizes_go_from_one_for_each_row_to_all_tokens(rows, length):
  sizes = compaction.sizes_for(rows, length)
  assert sizes[0] == rows
  assert sizes[-1] == rows * length
  assert list(sizes) == sorted(set(sizes))


@pytest.mark.parametrize(
  ('rows', 'least', 'most', 'expected'),
  [
    (1, 1, 16, [16]), (1, 1, 200, [128]),  # one row has no other to wait for
    (8, 1, 32, [16, 32]), (8, 1, 100, [16, 32, 48, 64, 96, 100]),
    # With 257 tokens in 8 rows one of them has at least 33.
    (8, 256, 320, [32, 48, 64, 96, 128]), (8, 257, 320, [48, 64, 96, 128]),
    (8, 769, 1000, [128]),
  ],
)  # fmt: skip
def test_a_row_has_places_for_as_many_queries_as_it_can_have(
  rows, least, most, expected
):
  assert packed_attention.query_sizes(rows, 128, least, most) == expected


@pytest.mark.parametrize(
  ('counts', 'size', 'least'),
  [
    ((5,), 6, 5),  # one row has places for all
    ((1, 4, 2), 8, 7),
    ((4, 0, 3), 8, 6),  # a row without any, as many as there are places
    ((8, 0, 0), 8, 1),  # one row has all
    ((8, 8, 8), 24, 17),  # all stay where they are
    ((3, 0, 7), 24, 1),
  ],
)
def test_packed_tokens_attend_to_all_of_their_row(counts, size, least):
  rows, length = len(counts), 8
  keys = jax.random.split(jax.random.key(0), 4)
  query, key, value = (
    jax.random.normal(key, (rows, 2, length, 4)) for key in keys[:3]
  )
  # Which tokens run has no order.
  order = jax.random.uniform(keys[3], (rows, length)).argsort(1)
  running = order < jnp.array(counts)[:, None]
  valid = jnp.arange(length)[None] < jnp.array([8, 6, 7])[:rows, None]
  value = jnp.where(valid[:, None, :, None], value, 0)
  expected, _ = attend(query, key, value, valid)
  packed = Packed.of(running, size)
  joined = (join_heads(one) for one in (key, value))
  attention = PackedAttention(packed, *joined, valid, least)

  def by_token(heads):
    return packed.pack(heads.transpose(0, 2, 1, 3))  # [M, N, H]

  out, _ = attention(by_token(query).transpose(1, 0, 2)[None])
  got = out[0].transpose(1, 0, 2)
  real = running.reshape(-1) if packed.whole else slice(sum(counts))
  np.testing.assert_allclose(got[real], by_token(expected)[real], atol=1e-5)
