"""The contract of a data set, of every source: order, hosts, padding, parts."""

import collections
import contextlib

import numpy as np
import pytest

from core.errors import ConfigError
from dataset_lib import builder
from dataset_lib.source import Drawn
from tests.dataset_lib import corpora, example_files, word_rows
from tests.dataset_lib.batches import (
  DIGITS,
  PARITY,
  TEXT,
  assert_same,
  build,
  global_batches,
  take,
)
from tests.dataset_lib.image_folder_test import write_image

ROWS, OTHERS = 30, 5  # of train, of the other split
AUGMENT = ('inception_crop', 'flip')


def folder(path):
  for label, name in enumerate(('cat', 'dog', 'eel')):
    for number in range((15, 10, 5)[label]):
      write_image(path / 'train' / name / f'{number}.png', 9 * number)
    write_image(path / 'test' / name / '0.png')
  write_image(path / 'test' / 'dog' / '1.png')
  write_image(path / 'test' / 'dog' / '2.png')
  return dict(name='folder', root=str(path), image_size=8, augment=AUGMENT)


def records(path):
  pytest.importorskip('tensorflow_datasets')
  for name, count in (('train', ROWS), ('test', OTHERS)):
    rows = [
      example_files.example(example_files.jpeg(8 * n), [n, *range(n % 3)])
      for n in range(count)
    ]
    example_files.write(path / f'{name}-0.tfrecord', rows[:3])
    example_files.write(path / f'{name}-1.tfrecord', rows[3:])
  size = dict(num_classes=ROWS, image_size=8)
  return dict(name='records', directory=str(path), **size)


def texts(path, task, config, header='sentence\tlabel'):
  corpora.tokenizer(path / 'vocabulary')
  pair = '\tw2 w3' if 'sentence2' in header else ''
  rows = [f'w{n}{" w1" * (n % 9)}{pair}\t{n % 2}' for n in range(ROWS)]
  for name, some in (('train', rows), ('test', rows[:OTHERS])):
    word_rows.write(path / 'data' / task / f'{name}.tsv', [header, *some])
  buckets = dict(max_length=16, length_buckets=(6, 10))
  return config(path / 'data', task, **buckets)


def own(path):
  words = str(corpora.tokenizer(path / 'vocabulary'))
  rows = [f'w{n}{" w1" * (n % 9)},{n % 2}' for n in range(ROWS)]
  for name, some in (('train', rows), ('test', rows[:OTHERS]), ('dev', rows)):
    word_rows.write(path / f'{name}.csv', ['text,label', *some])
  given = dict(path=str(path), tokenizer=words, max_length=16)
  return dict(name='texts', length_buckets=(6, 10), **given)


def tags(path):
  words = str(corpora.tokenizer(path / 'vocabulary'))
  sentence = 'w1 A\nw2 B\n' * 2, 'w3 B\n'
  for name, count in (('train', ROWS), ('test', OTHERS)):
    rows = [sentence[number % 2] for number in range(count)]
    word_rows.write(path / f'{name}.txt', rows)
  given = dict(directory=str(path), tokenizer=words, max_length=8)
  return dict(name='tags', length_buckets=(5, 8), **given)


def pretraining(path):
  directory, _ = corpora.prepare(path, corpora.documents(20))
  return corpora.pretraining_config(directory)


PAIRS = 'sentence1\tsentence2\tlabel'
GRAVES = dict(name='recurrent_act.data:Graves', task='sort', train_examples=50)
FILES = {
  'folder': folder,
  'records': records,
  'sst2': lambda path: texts(path, 'sst2', word_rows.config),
  'stsb': lambda path: texts(path, 'stsb', word_rows.config, PAIRS),
  'probing': lambda path: texts(path, 'own', word_rows.probing),
  'tags': tags,
  'own': own,
}
SOURCES = FILES | {
  'parity': lambda path: PARITY,
  'letters': lambda path: PARITY | dict(letters=26),
  'digits': lambda path: DIGITS,
  'texts': lambda path: TEXT | dict(train_examples=100),
  'graves': lambda path: GRAVES | dict(test_examples=10),
  'pretraining': pretraining,
}


@pytest.fixture(scope='module', params=SOURCES)
def config(request, tmp_path_factory):
  return SOURCES[request.param](tmp_path_factory.mktemp(request.param))


def held_out(config):
  return 'validation' if config['name'] == 'pretraining' else 'test'


@pytest.mark.parametrize('hosts', [2, 8])
def test_a_batch_depends_on_seed_and_step_alone(config, hosts):
  count = 14  # more than two epochs of most
  expected = take(build(config), count)
  read = global_batches(hosts, count, config=config, num_threads=0)
  assert_same(read, expected)
  for start in (1, 5, count - 1):
    data = build(config, num_threads=hosts, prefetch=7)
    assert_same(take(data, count - start, start), expected[start:])
  other = take(build(config, seed=1), count)
  pairs = zip(expected, other, strict=True)
  assert any((one['index'] != two['index']).any() for one, two in pairs)
  # To replay so many steps would take days.
  later = take(build(config, num_threads=0), 1, start_step=10**9)
  assert_same(take(build(config), 2, 10**9 - 1)[1:], later)


@pytest.mark.parametrize('hosts', [1, 4])
def test_evaluation_is_one_padded_pass(config, hosts):
  given = dict(config=config, split=held_out(config), train=False, batch_size=8)
  batches = global_batches(hosts, 100, **given)
  data = build(**given)
  size, steps = data.info.num_examples, data.steps_per_epoch
  assert len(batches) == steps == -(-size // 8)
  index = np.concatenate([batch['index'] for batch in batches])
  assert sorted(index[:size]) == list(range(size))
  lengths = data.source.lengths
  order = index[:size] if lengths is None else lengths[index[:size]]
  assert order.tolist() == sorted(order)
  mask = np.concatenate([batch['mask'] for batch in batches])
  assert mask.tolist() == [1] * size + [0] * (8 * steps - size)
  fill = {**data.source.padding, 'index': -1}
  for key, values in batches[-1].items():
    padding = values[size - 8 * steps :] if size % 8 else values[:0]
    assert (padding == fill.get(key, 0)).all(), key
  if hosts == 1:  # it can start late and after its end
    assert_same(list(data.batches(steps - 1)), batches[-1:])
    assert list(data.batches(steps)) == list(data.batches(99)) == []


def test_rows_are_the_records_that_their_index_names(config):
  given = config | ({'augment': ()} if 'augment' in config else {})
  source = builder.build_source(given, 'train')
  assert len(source) == source.info.num_examples
  padding = {'label': -1, **source.padding}
  for batch in take(build(given), 3):
    assert batch['mask'].tolist() == [1] * 16
    types = {str(values.dtype) for values in batch.values()}
    assert types <= {'uint8', 'int32', 'float32'}
    for row, index in enumerate(batch['index']):
      record = source.record(int(index))
      for key, value in record.items():
        if key == 'image':
          value = source.transform(value)
        if isinstance(source, Drawn) or np.shape(value) == (0,):
          continue  # changes with the epoch
        got, value = batch[key][row], np.asarray(value)
        if value.ndim == 1:
          assert (got[len(value) :] == padding.get(key, 0)).all()
          got = got[: len(value)]
        np.testing.assert_array_equal(got, value)


def test_shapes_without_data_are_of_its_batches(config):
  data = build(config)
  info = data.info
  # What generated data know themselves is not asked for.
  is_read = {'root', 'directory', 'path'} & {*config}
  asked = (info.num_classes, info.num_examples) if is_read else (7, 7)
  found, rows = builder.sketch(builder.validate(config), 'train', *asked)
  for name in (
    'input_key', 'input_shape', 'input_dtype', 'num_classes', 'label_dtype',
    'max_labels', 'num_examples',
  ):  # fmt: skip
    assert getattr(found, name) == getattr(info, name), name
  assert rows == data.row_shapes()
  assert rows[info.input_key] == (info.input_shape, info.input_dtype)


def places(config, split):
  source = builder.build_source(config, split)
  assert source.info.num_examples == len(source)
  return [source.where(row) for row in range(len(source))]


def some(config, split):
  """The rows of a part, [] if it is refused for having none."""
  with contextlib.suppress(ConfigError):
    return places(config, split)
  return []


@pytest.mark.parametrize('make', FILES.values(), ids=FILES)
def test_parts_of_every_source(make, tmp_path):
  config = make(tmp_path)
  whole = places(config, 'train')
  assert len({*whole}) == ROWS
  for bound in ('50%', '90%', '1%', '-10%', '-1%', '-99%', '2', '-7', '29'):
    halves = f'train[:{bound}]', f'train[{bound}:]'
    first, last = (some(config, half) for half in halves)
    assert sorted(first + last) == sorted(whole)
    number = int(bound.rstrip('%'))
    number += (100 if '%' in bound else ROWS) * (number < 0)
    share = number * ROWS / 100 if '%' in bound else number
    assert len(first) == round(share), bound
  for split in ('train[60%:40%]', 'train[30:]', 'test+train[3:3]'):
    with pytest.raises(ConfigError, match='selects 0 of the 30 rows'):
      places(config, split)
  parts = places(config, 'train[:3]+test+train[-20%:]')
  assert len(parts) == 3 + OTHERS + 6


def test_a_part_of_a_folder_has_a_share_of_each_class(tmp_path):
  config = folder(tmp_path)
  part = places(config, 'train[:40%]')
  count = collections.Counter(place.split('/')[-2] for place in part)
  assert count == dict(cat=6, dog=4, eel=2)
  assert part == sorted(part)
  # The order is that of names: another image changes little.
  write_image(tmp_path / 'train' / 'cat' / 'new.png')
  assert len({*part} - {*places(config, 'train[:40%]')}) <= 1


def test_a_part_of_a_corpus(tmp_path):
  config = pretraining(tmp_path)
  whole, half = places(config, 'train'), places(config, 'train[50%:]')
  assert half == whole[round(len(whole) / 2) :]
  rows = [builder.build_source(config, f'train{p}') for p in ('', '[50%:]')]
  last = [part.record(len(part) - 1)['tokens'].tolist() for part in rows]
  assert last[0] == last[1]
  for split in ('train[:0]', f'train[{len(whole)}:]'):
    with pytest.raises(ConfigError, match='selects 0 of'):
      places(config, split)
  with pytest.raises(ConfigError, match='split: expected train, validation'):
    places(config, 'train+validation')
