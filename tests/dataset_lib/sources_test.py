"""The contract of a data set, of every source: order, hosts, padding, parts."""

import collections
import contextlib
import shutil

import numpy as np
import pytest

from core.errors import ConfigError
from dataset_lib import builder
from dataset_lib.source import Batched, Drawn
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

AUGMENT = ('inception_crop', 'flip')
WORDS = dict(max_length=16, length_buckets=(6, 10))
GRAVES = dict(name='recurrent_act.data:Graves', task='sort', train_examples=50)
# Of the stand-in data: the place's field, and other fields.
FILES = {
  'images': ('root', dict(name='folder', image_size=8, augment=AUGMENT)),
  'records': ('directory', dict(name='records', num_classes=5, image_size=8)),
  'sst2': ('directory', WORDS | dict(name='glue', task='sst2')),
  'stsb': ('directory', WORDS | dict(name='glue', task='stsb')),
  'probing': ('directory', WORDS | dict(name='probing', task='past_present')),
  'tags': ('directory', WORDS | dict(name='tags')),
  'own': ('path', WORDS | dict(name='texts', text='sentence')),
  'corpus': ('directory', dict(name='pretraining', max_length=32)),
}
GENERATED = {
  'parity': PARITY, 'letters': PARITY | dict(letters=26), 'digits': DIGITS,
  'texts': TEXT | dict(train_examples=100),
  'graves': GRAVES | dict(test_examples=10),
}  # fmt: skip


def read_config(folders, name):
  """The configuration of a data set in files."""
  place, fields = FILES[name]
  given = {place: folders.get(name, folders['glue']), **fields}
  words = dict(tokenizer=folders['vocabulary'])
  return given | (words if 'length_buckets' in fields else {})


@pytest.fixture(scope='module', params=[*FILES, *GENERATED])
def config(request, folders):
  return GENERATED.get(request.param) or read_config(folders, request.param)


def held_out(config):
  of_tests = 'folder', 'parity', 'digits'
  is_test = config['name'] in of_tests or ':' in config['name']
  return 'test' if is_test else 'validation'


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
  given = dict(config=config, split=held_out(config), train=False)
  given['batch_size'] = 20
  batches = global_batches(hosts, 100, **given)
  data = build(**given)
  size, steps = data.info.num_examples, data.steps_per_epoch
  assert len(batches) == steps == -(-size // 20)
  index = np.concatenate([batch['index'] for batch in batches])
  assert sorted(index[:size]) == list(range(size))
  lengths = data.source.lengths
  order = index[:size] if lengths is None else lengths[index[:size]]
  assert order.tolist() == sorted(order)
  mask = np.concatenate([batch['mask'] for batch in batches])
  assert mask.tolist() == [1] * size + [0] * (20 * steps - size)
  fill = {**data.source.padding, 'index': -1}
  for key, values in batches[-1].items():
    padding = values[size - 20 * steps :] if size % 20 else values[:0]
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
        is_drawn = isinstance(source, Drawn) and not isinstance(source, Batched)
        if is_drawn or np.shape(value) == (0,):
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


@pytest.mark.parametrize('name', [*FILES][:-1])  # of a corpus see below
def test_parts_of_every_source(folders, name):
  config = read_config(folders, name)
  other, whole = held_out(config), places(config, 'train')
  rows = len({*whole})
  assert rows == len(whole) > 10
  for bound in (
    '50%', '90%', '1%', '-10%', '-1%', '-99%', '2', '-7', str(rows - 1)
  ):  # fmt: skip
    halves = f'train[:{bound}]', f'train[{bound}:]'
    first, last = (some(config, half) for half in halves)
    assert sorted(first + last) == sorted(whole)
    number = int(bound.rstrip('%'))
    number += (100 if '%' in bound else rows) * (number < 0)
    share = number * rows / 100 if '%' in bound else number
    assert len(first) == round(share), bound
  for split in ('train[60%:40%]', f'train[{rows}:]', f'{other}+train[3:3]'):
    with pytest.raises(ConfigError, match=f'selects 0 of the {rows} rows'):
      places(config, split)
  parts = places(config, f'train[:3]+{other}+train[-20%:]')
  others = len(places(config, other))
  assert len(parts) == 3 + others + rows - round(0.8 * rows)


def test_a_part_of_a_folder_has_a_share_of_each_class(folders, tmp_path):
  config = read_config(folders, 'images') | dict(root=str(tmp_path / 'images'))
  root = shutil.copytree(folders['images'], tmp_path / 'images')
  for number in range(12):  # of 8 cats and 8 dogs
    write_image(root / 'train' / 'dog' / f'more{number}.png')
  part = places(config, 'train[:50%]')
  count = collections.Counter(place.split('/')[-2] for place in part)
  assert count == dict(cat=4, dog=10)
  assert part == sorted(part)
  # The order is that of names: another image changes little.
  write_image(root / 'train' / 'cat' / 'new.png')
  assert len({*part} - {*places(config, 'train[:50%]')}) <= 1


def test_a_part_of_a_corpus(folders):
  config = read_config(folders, 'corpus')
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
