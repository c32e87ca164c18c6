"""Positions map to records: a permutation per epoch, rows split over hosts."""

import numpy as np
import pytest

from dataset_lib import order
from dataset_lib.errors import ConfigError


@pytest.mark.parametrize('num_examples', [1, 2, 7, 1000])
def test_each_epoch_is_another_permutation(num_examples):
  places = order.Order(num_examples, seed=3, shuffle=True)
  epochs = []
  for epoch in range(3):
    start = epoch * num_examples
    read = [places.place(start + p) for p in range(num_examples)]
    assert {e for e, _ in read} == {epoch}
    epochs.append([index for _, index in read])
    assert sorted(epochs[-1]) == list(range(num_examples))
  if num_examples == 1000:
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != list(range(num_examples))


def test_large_sets_are_permuted_without_a_table(monkeypatch):
  monkeypatch.setattr(order, '_TABLE_EXAMPLES', 0)
  monkeypatch.setattr(order, '_table', None)
  read = [order.permuted(p, 3000, 5, 1) for p in range(3000)]
  assert sorted(read) == list(range(3000))
  assert read != [order.permuted(p, 3000, 5, 2) for p in range(3000)]


def test_a_set_beyond_the_table_uses_constant_memory():
  places = order.Order(2**31 - 1, seed=0, shuffle=True)
  read = {places.place(p)[1] for p in range(64)}
  assert len(read) == 64
  assert max(read) > 2**24
  assert order._table.cache_info().currsize <= 4


def test_seeds_give_different_orders():
  orders = [order.Order(100, seed, shuffle=True) for seed in range(5)]
  read = {tuple(o.place(p)[1] for p in range(100)) for o in orders}
  assert len(read) == 5


def test_positions_are_uniform_over_epochs():
  first = [order.permuted(0, 10, 0, epoch) for epoch in range(1000)]
  counts = np.bincount(first, minlength=10)
  # 99.9 % quantile of chi-square with 9 degrees of freedom.
  assert np.sum((counts - 100) ** 2 / 100) < 27.9


def test_an_ordered_pass_ends():
  places = order.Order(3, seed=0, shuffle=False)
  assert [places.place(p) for p in range(5)] == [
    (0, 0),
    (0, 1),
    (0, 2),
    None,
    None,
  ]


def test_a_replacement_is_a_function_of_its_arguments():
  places = order.Order(1000, seed=1, shuffle=True)
  draws = [places.replacement(2, 5, attempt) for attempt in range(20)]
  assert draws == [places.replacement(2, 5, attempt) for attempt in range(20)]
  assert len(set(draws)) > 15
  assert all(0 <= draw < 1000 for draw in draws)


def test_hosts_split_the_rows_in_order():
  rows = [list(order.local_rows(8, host, 4)) for host in range(4)]
  assert rows == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
  ('batch_size', 'host_index', 'host_count', 'key'),
  [
    (6, 0, 4, 'batch_size'),
    (0, 0, 1, 'batch_size'),
    (8, 4, 4, 'host_index'),
    (8, -1, 4, 'host_index'),
    (8, 0, 0, 'host_count'),
  ],
)
def test_impossible_hosts(batch_size, host_index, host_count, key):
  with pytest.raises(ConfigError) as error:
    order.local_rows(batch_size, host_index, host_count)
  assert error.value.field == key
