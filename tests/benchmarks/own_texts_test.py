"""Small sets of texts, and the table of runs on them."""

import csv
import gzip

import pytest

from benchmarks import own_texts, small_texts
from tests import shell


def write_public(root):
  """Writes the public files, each with a text twice, some also in both."""
  for public in small_texts.PUBLIC.values():
    for file, start in ((public.train, 0), (public.test, 1100)):
      path = root / f'{file}.tsv.gz'
      path.parent.mkdir(parents=True, exist_ok=True)
      lines = ['\t'.join(['idx', *public.columns])]
      for n in range(start, start + 1300):
        cells = f'say "{n % 1290}', 'abc'[n % 3], f'other {n}'
        lines.append('\t'.join([str(n), *cells[: len(public.columns)]]))
      unlabelled = ['-1', 'no label', *[''] * (len(public.columns) - 1)]
      unknown = ['-2', 'no label', 'unknown', *unlabelled[3:]]
      lines += ['\t'.join(unlabelled), '\t'.join(unknown)]
      with gzip.open(path, 'wt') as out:
        out.write('\n'.join(lines) + '\n')


def test_small_sets_share_no_text(tmp_path):
  write_public(tmp_path)
  command = [f'--data={tmp_path}', f'--out={tmp_path}/sets']
  assert small_texts.main(command) == 0
  for name in ('tickets', *small_texts.PUBLIC):
    train, test = (
      shell.table(tmp_path / 'sets' / name / f'{split}.csv')
      for split in ('train', 'test')
    )
    assert len(train) == (1000 if name == 'qqp' else 400)
    assert 200 < len(test) <= 1000
    texts = [row['text'] for row in train + test]
    assert len({*texts}) == len(texts)
    assert 'no label' not in texts
    assert all(row['label'] for row in train + test)
    assert ('pair' in train[0]) is (name == 'qqp')
  kinds = {
    row['label'] for row in shell.table(tmp_path / 'sets/tickets/train.csv')
  }
  assert kinds == {*small_texts.TICKETS}
  with pytest.raises(SystemExit):  # the sets are not replaced
    small_texts.main(command)


def test_seeds_choose_the_rows(tmp_path):
  write_public(tmp_path)
  made = []
  for folder, seed in (('a', 1), ('b', 1), ('c', 2)):
    out = tmp_path / folder
    small_texts.main([f'--data={tmp_path}', f'--out={out}', f'--seed={seed}'])
    made.append((out / 'sst2' / 'train.csv').read_text())
  assert made[0] == made[1] != made[2]


def test_a_table_has_the_mean_the_least_and_the_most(tmp_path, monkeypatch):
  runs = iter([80.0, 90.0, 85.0, 70.0, 70.0, 70.0])

  def row(path, seed, flags):
    return {'set': path.stem, 'seed': seed, 'rows': 140, 'test_rows': 100,
            'dense': next(runs)}  # fmt: skip

  monkeypatch.setattr(own_texts, '_row', row)
  for name in ('a_set', 'b'):
    (tmp_path / 'data' / name).mkdir(parents=True)
  out, table = tmp_path / 'runs.csv', tmp_path / 'table.csv'
  own_texts.main([f'--data={tmp_path}/data', '--workdir=w', f'--out={out}',
                  f'--table={table}'])  # fmt: skip
  with out.open() as file:
    assert [row['dense'] for row in csv.DictReader(file)][:2] == [
      '80.0',
      '90.0',
    ]
  expected = {'texts': 'a set', 'rows': '40', 'dense': '85 (80 to 90)'}
  assert shell.table(table)[0] == expected
