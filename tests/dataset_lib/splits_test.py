"""Splits that are made: shares, groups, order, digest."""

import collections
import random

import pytest

from dataset_lib import splits
from dataset_lib.splits import Row

SIZES = {'many': 203, 'some': 31, 'few': 5, 'two': 2, 'one': 1}


def one(label, group, content=''):
  return Row([label], group.encode(), (content or group).encode())


def rows():
  return [one(k, f'{k}{n}') for k, size in SIZES.items() for n in range(size)]


def named(made, given):
  return {given[row].content: name for name in made for row in made[name]}


@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('shares', [splits.SHARES, (0.8, 0.2, 0.0)])
def test_each_label_has_the_shares_within_a_row(seed, shares):
  given = rows()
  made, about = splits.make(given, shares, seed)
  rows_made = sorted(row for part in made.values() for row in part)
  assert rows_made == [*range(len(given))]
  assert about['rows'] == {name: len(made[name]) for name in splits.NAMES}
  for name, share in zip(splits.NAMES, shares, strict=True):
    counts = collections.Counter(given[row].labels[0] for row in made[name])
    for label, size in SIZES.items():
      if size > 1:
        assert abs(counts[label] - share * size) <= 1, (name, label)
  assert {given[row].labels[0] for row in made['train']} == {*SIZES}


def test_a_label_without_rows_in_a_split_is_told_once(caplog):
  given = [one('a', f'{n}') for n in range(9)] + [one('lone', 'x')] * 2
  for _ in splits.NAMES:
    splits.make(given, splits.SHARES, 0)
  [record] = caplog.records
  assert record.getMessage().endswith('of which a split has none: lone')


def test_labels_of_two_rows_are_in_all_splits_together():
  given = [one(f'{n}', f'{n} {k}') for n in range(500) for k in range(2)]
  made, _ = splits.make(given, splits.SHARES, 0)
  sizes = [len(made[name]) for name in splits.NAMES]
  assert sizes == pytest.approx([600, 200, 200], abs=40)


@pytest.mark.parametrize('size', [1, 7])
def test_a_group_is_in_one_split(size):
  labels = random.Random(0).choices('abc', k=700)
  given = [one(label, str(n // size), str(n)) for n, label in enumerate(labels)]
  made, _ = splits.make(given, splits.SHARES, 0)
  found = collections.defaultdict(set)
  for name, part in made.items():
    for row in part:
      found[given[row].group].add(name)
  assert {len(names) for names in found.values()} == {1}
  assert len(made['validation']) == pytest.approx(140, abs=2 * size)


def test_a_split_follows_from_seed_and_content_alone():
  given = rows()
  made, about = splits.make(given, splits.SHARES, 0)
  mixed = random.Random(1).sample(given, len(given))
  again, same = splits.make(mixed, splits.SHARES, 0)
  assert same == about
  for name in splits.NAMES:  # also their order, of which parts are taken
    assert [given[n] for n in made[name]] == [mixed[n] for n in again[name]]
  other, of_seed = splits.make(given, splits.SHARES, 1)
  assert named(other, given) != named(made, given)
  assert of_seed['digest'] != about['digest']
  for changed in (given[1:], [given[0]._replace(content=b'x'), *given[1:]]):
    _, of_changed = splits.make(changed, splits.SHARES, 0)
    assert of_changed['digest'] != about['digest']
