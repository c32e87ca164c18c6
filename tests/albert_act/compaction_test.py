"""Which tokens are computed: how they are packed, and in which sizes."""

import jax.numpy as jnp
import numpy as np
import pytest

from albert_act import compaction
from albert_act.packed_attention import Packed


@pytest.mark.parametrize(
  ('size', 'order'),
  [
    (5, [0, 2, 9, 10, 11]),
    (6, [0, 2, 9, 10, 11]),
    (12, list(range(12))),  # with room for all, all stay where they are
  ],
)
def test_running_tokens_are_packed_in_their_order(size, order):
  running = jnp.array([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]], bool)
  packed = Packed.of(running, size)
  order = np.array(order)
  np.testing.assert_array_equal(packed.index[: len(order)], order)
  np.testing.assert_array_equal(packed.row[: len(order)], order // 4)
  leaf = jnp.arange(24.0).reshape(3, 4, 2)
  assert packed.pack(leaf).shape == (size, 2)
  np.testing.assert_array_equal(packed.pack(leaf)[: len(order), 0], 2 * order)
  # There and back: running tokens get the new, the others keep the old.
  back = packed.unpack(-packed.pack(leaf), leaf)
  sign = jnp.where(running, -1.0, 1.0)[:, :, None]
  np.testing.assert_array_equal(back, sign * leaf)
  heads = jnp.arange(24.0).reshape(3, 2, 4, 1)
  by_head = packed.pack(heads.transpose(0, 2, 1, 3)).transpose(1, 0, 2)
  back = packed.unpack_heads(-by_head, heads)
  sign = jnp.where(running, -1.0, 1.0)[:, None, :, None]
  np.testing.assert_array_equal(back, sign * heads)


@pytest.mark.parametrize(
  ('rows', 'length'), [(1, 1), (1, 5), (4, 4), (1, 128), (32, 16), (8, 512)]
)
def test_sizes_go_from_one_for_each_row_to_all_tokens(rows, length):
  sizes = compaction.sizes_for(rows, length)
  assert sizes[0] == rows
  assert sizes[-1] == rows * length
  assert list(sizes) == sorted(set(sizes))


def test_few_tokens_have_sizes_of_their_own():
  assert compaction.sizes_for(1, 128) == (1, 8, 16, 24, 32, 64, 80, 96, 128)
  sizes = compaction.sizes_for(8, 128)
  assert sizes[:7] == (8, 16, 24, 32, 64, 96, 128)
