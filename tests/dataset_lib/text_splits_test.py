"""Splits of texts of one's own: given, made, in parts; groups and digests."""

import os
import random

import pytest

from core.errors import ConfigError, InvalidDataError, MissingDataError
from tests.dataset_lib.texts_test import GOOD, SPLITS, config, file, replaced
from tests.dataset_lib.word_rows import opened, read, write


def test_splits_are_the_same_in_any_order_and_form(root):
  rows = [(f'w{n % 30} w{n // 30}', 'abc'[n % 3]) for n in range(300)]
  mixed = random.Random(0).sample(rows, 300)
  a, b = (
    opened(
      file(root, map(tab.join, order), tab.join(['text', 'label']), name=name),
      'validation[:40%]',
    )
    for name, tab, order in (('a.csv', ',', rows), ('b.tsv', '\t', mixed))
  )
  assert sorted(read(a)) == sorted(read(b))
  assert len(a) == 24
  assert a.info.splits == b.info.splits
  assert a.info.splits['rows'] == {'train': 180, 'validation': 60, 'test': 60}


@pytest.mark.parametrize('shares', [(1.0, 0.0, 0.0), (0.8, 0.2, 0.0)])
def test_a_split_without_rows_is_named(root, shares):
  given = file(root, GOOD) | dict(split_shares=shares)
  with pytest.raises(InvalidDataError, match=r"'test' .* is empty; its file"):
    opened(given, 'test')


def test_a_digest_tells_rows_and_labels_apart(root):
  digests = {
    opened(file(root, rows), 'all').info.digest
    for rows in (GOOD, GOOD[::-1], replaced('w7,b', 'w7,a'),
                 replaced('w7,', 'w8,'), replaced('w7,', ' w7 ,'))
  }  # fmt: skip
  assert len(digests) == 4


def test_texts_and_groups_are_in_one_split(root):
  # Spaces do not count, nor do those of a group.
  rows = [f'w{n % 20},{"ab"[n % 2]},g{n // 30}{" " * (n % 3)}'
          for n in range(300)]  # fmt: skip
  given = file(root, rows, 'text,label,user')

  def of_splits(**fields):
    return [opened(given | fields, name) for name in SPLITS]

  texts = [{text for text, _ in read(one)} for one in of_splits()]
  assert len(set.union(*texts)) == sum(map(len, texts)) == 20
  users = [
    {(int(one.where(n).split()[-1]) - 2) // 30 for n in range(len(one))}
    for one in of_splits(group='user')
  ]
  assert len(set.union(*users)) == sum(map(len, users)) == 10


def test_a_folder_has_its_splits_and_lacks_some(root, caplog):
  write(root / 'own' / 'train.csv', ['text,label', *GOOD])
  write(root / 'own' / 'Dev.CSV', ['text,label', *GOOD[:10], *['w1 w1,a'] * 20])
  given = config(root / 'own')
  sizes = {'train': 24, 'validation': 30, 'dev': 30, 'test': 6}
  for split, size in sizes.items():
    assert len(opened(given, split)) == size
    expected = 'of 30 rows have the texts of rows of train'
    assert (expected in caplog.text) == (split in ('validation', 'dev'))
    caplog.clear()
  with pytest.raises(ConfigError, match="'all' alone"):
    opened(given, 'all')
  write(root / 'own' / 'test.csv', ['text,label', 'w1,a', 'w2,c'])
  assert len(opened(given)) == 30
  assert opened(given).info.splits == {}
  # A class that was never trained is no row to evaluate.
  [(_, bad)] = opened(given, 'test').bad_rows
  assert bad.kind == 'illegal_label'
  write(root / 'own' / 'train.tsv', ['text\tlabel', 'w1\ta'])
  with pytest.raises(InvalidDataError, match='expected one file of train'):
    opened(given)
  os.symlink('loop.csv', root / 'loop.csv')
  with pytest.raises(InvalidDataError, match=r'damaged.*symbolic'):
    opened(config(root / 'loop.csv'))
  (root / 'none').mkdir()
  with pytest.raises(MissingDataError, match=r'expected train\.csv'):
    opened(config(root / 'none'))


def test_a_split_may_have_parts(root):
  folder, parts = root / 'own', (GOOD[:13], GOOD[13:])
  for number, rows in enumerate(parts):
    name = f'train-0000{number}-of-00002-0a1b.csv'
    write(folder / name, ['text,label', *rows])
  whole, source = opened(file(root, GOOD)), opened(config(folder))
  assert read(source) == read(whole)
  assert source.info.splits == whole.info.splits
  # Places name the part.
  every = opened(config(folder), 'all')
  assert every.where(13) == f'{folder}/train-00001-of-00002-0a1b.csv, line 2'
  assert len(every) == len(GOOD)
  first = folder / 'train-00000-of-00002-0a1b.csv'
  write(first, ['text,kind', *GOOD[:13]])
  with pytest.raises(InvalidDataError, match=r'00001.*expected the columns'):
    opened(config(folder))
  first.unlink()
  with pytest.raises(InvalidDataError, match='or all parts, as train-00000-of'):
    opened(config(folder))
