"""Batch buckets."""

import pytest

from serve_lib.schedule import doubling


@pytest.mark.parametrize(
  ('largest', 'expected'),
  [(1, (1,)), (12, (1, 2, 4, 8, 12)), (16, (1, 2, 4, 8, 16))],
)
def test_doubling_ends_with_the_largest(largest, expected):
  assert doubling(largest) == expected
