"""One rule of parts of a split, the same in every source."""

import collections
import contextlib

import pytest

from core.errors import ConfigError
from dataset_lib import builder
from tests.dataset_lib import corpora, example_files, word_rows
from tests.dataset_lib.image_folder_test import write_image

ROWS = 30


def folder(path):
  for label, name in enumerate(('cat', 'dog', 'eel')):
    for number in range((15, 10, 5)[label]):
      write_image(path / 'train' / name / f'{number}.png')
  write_image(path / 'extra' / 'dog' / '0.png')
  return dict(name='folder', root=str(path), image_size=8)


def records(path):
  pytest.importorskip('tensorflow_datasets')
  for name, count in (('train', ROWS), ('extra', 1)):
    rows = [example_files.example(b'x', [n]) for n in range(count)]
    example_files.write(path / f'{name}-0.tfrecord', rows)
  given = dict(directory=str(path), num_classes=ROWS, image_size=8)
  return dict(name='records', **given)


def texts(path, task, given):
  corpora.tokenizer(path / 'vocabulary')
  (path / 'data').mkdir()
  rows = ['sentence\tlabel', *(f'w{n}\t{n % 2}' for n in range(ROWS))]
  word_rows.write(path / 'data' / task / 'train.tsv', rows)
  word_rows.write(path / 'data' / task / 'dev.tsv', rows[:2])
  return given(path / 'data', task)


def glue(path):
  return texts(path, 'sst2', word_rows.config)


def probing(path):
  return texts(path, 'own', word_rows.probing)


def tags(path):
  corpora.tokenizer(path / 'vocabulary')
  word_rows.write(path / 'train.txt', ['w1 A\n\nw2 B\n'] * 15)
  word_rows.write(path / 'dev.txt', ['w1 A'])
  vocabulary = str(path / 'vocabulary')
  return dict(name='tags', directory=str(path), tokenizer=vocabulary)


def opened(given, split):
  other = 'extra' if given['name'] in ('folder', 'records') else 'dev'
  source = builder.build_source(given, split.replace('other', other))
  assert source.info.num_examples == len(source)
  return [source.where(row) for row in range(len(source))]


def some(given, split):
  """The rows of a part, [] if it is refused for having none."""
  with contextlib.suppress(ConfigError):
    return opened(given, split)
  return []


@pytest.mark.parametrize('make', [folder, records, glue, probing, tags])
def test_parts_of_every_source(make, tmp_path):
  given = make(tmp_path)
  whole = opened(given, 'train')
  assert len({*whole}) == ROWS
  for bound in ('50%', '90%', '1%', '-10%', '-1%', '-99%', '2', '-7', '29'):
    first, last = (
      some(given, f'train[{p}]') for p in (f':{bound}', f'{bound}:')
    )
    assert sorted(first + last) == sorted(whole)
    number = int(bound.rstrip('%'))
    number += (100 if '%' in bound else ROWS) * (number < 0)
    share = number * ROWS / 100 if '%' in bound else number
    assert len(first) == round(share), bound
  for split in ('train[60%:40%]', 'train[30:]', 'other+train[3:3]'):
    with pytest.raises(ConfigError, match='selects 0 of the 30 rows'):
      opened(given, split)
  assert len(opened(given, 'train[:3]+other+train[-20%:]')) == 3 + 1 + 6


def test_a_part_of_a_folder_has_a_share_of_each_class(tmp_path):
  given = folder(tmp_path)
  part = opened(given, 'train[:40%]')
  count = collections.Counter(place.split('/')[-2] for place in part)
  assert count == dict(cat=6, dog=4, eel=2)
  assert part == sorted(part)
  # The order is that of names: another image changes little.
  write_image(tmp_path / 'train' / 'cat' / 'new.png')
  assert len({*part} - {*opened(given, 'train[:40%]')}) <= 1


def test_a_part_of_a_corpus(tmp_path):
  directory, _ = corpora.prepare(tmp_path, corpora.documents(20))
  given = corpora.pretraining_config(directory)
  whole, half = opened(given, 'train'), opened(given, 'train[50%:]')
  assert half == whole[round(len(whole) / 2) :]
  rows = [builder.build_source(given, f'train{p}') for p in ('', '[50%:]')]
  last = [part.record(len(part) - 1)['tokens'].tolist() for part in rows]
  assert last[0] == last[1]
  for split in ('train[:0]', f'train[{len(whole)}:]'):
    with pytest.raises(ConfigError, match='selects 0 of'):
      opened(given, split)
  with pytest.raises(ConfigError, match='split: expected train, validation'):
    opened(given, 'train+validation')
