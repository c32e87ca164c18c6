"""TFDS directories in both formats, read without TensorFlow, and damage."""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys

import cv2
import numpy as np
import pytest

from core import errors
from dataset_lib import builder
from dataset_lib.bad_records import TooManyBadRecordsError
from dataset_lib.corpus.texts import Faults, Texts
from dataset_lib.records.sharded import RecordFiles
from tests.dataset_lib import corpora
from tests.dataset_lib.batches import build, take

load = functools.partial(build, train=False, batch_size=4)

pytest.importorskip('tensorflow_datasets')
writable = importlib.util.find_spec('tensorflow') is not None
needed = pytest.mark.skipif(not writable, reason='TFDS writes by tensorflow')
pytestmark = [pytest.mark.slow, needed]


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  """A folder of the data sets of `tfds_files`, and a vocabulary."""
  root = tmp_path_factory.mktemp('tfds')
  words = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', *(f'w{n}' for n in range(20))]
  corpora.tokenizer(root, [*words, 'e'])
  command = [sys.executable, '-m', 'tests.dataset_lib.tfds_files', str(root)]
  subprocess.run(command, check=True, capture_output=True)
  return root


@pytest.fixture(params=['array_record', 'tfrecord'])
def images(request, data_dir):
  """A data_dir of a set 'tiny' of constant images, in either format."""
  return data_dir / request.param


@pytest.fixture
def copy(data_dir, tmp_path):
  """A TFRecord copy that a test may damage."""
  folder = data_dir / 'tfrecord' / 'tiny' / '1.0.0'
  return shutil.copytree(folder, tmp_path / 'copy')


def config(data_dir, name='tiny'):
  return dict(name='tfds', builder=name, data_dir=str(data_dir), image_size=8)


def values(data_dir, split='train', name='tiny'):
  """The constant of every image; fails unless it is one."""
  source = builder.build_source(config(data_dir, name), split)
  assert source.info.num_classes == 3
  assert source.info.class_names == ('ant', 'bee', 'cat')
  assert source.info.num_examples == len(source)
  result = []
  for index in range(len(source)):
    record = source.record(index)
    data = np.frombuffer(record['image'], np.uint8)
    image = cv2.imdecode(data, cv2.IMREAD_COLOR)
    [value] = np.unique(image).tolist()
    assert image.shape == (9, 12, 3)
    assert split != 'train' or record['label'] == value % 3
    result.append(value)
  return result


def test_records_by_name_and_by_directory(images):
  folder = images / 'tiny' / '1.0.0'
  before = sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir())
  whole = values(images)
  assert sorted(whole) == list(range(20))
  assert whole == values(images.parent / 'tfrecord')
  test = list(range(100, 107))
  assert values(images, 'test') == values(folder, 'test', '') == test
  for split, expected in {
    'train[:90%]': whole[:18], 'train[90%:]': whole[18:],
    'train[5:11]': whole[5:11], 'train[15:]+test': whole[15:] + test,
    'train[-4%:]': whole[-1:], 'train[:-1%]': whole,
  }.items():  # fmt: skip
    assert values(images, split) == expected
  with pytest.raises(errors.ConfigError, match='selects 0 of the 20 rows'):
    values(images, 'train[-1%:]')
  # Nothing is written beside the data.
  after = sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir())
  assert before == after


def test_batches(images):
  known = np.array(values(images))
  for batch in take(load(config(images), 'train', train=True), 4):
    constants = known[batch['index']]
    assert batch['image'].shape == (4, 8, 8, 3)
    assert (constants == batch['image'].T).all()
    assert (batch['label'] == constants % 3).all()


def edited(path, edit):
  """Changes the content of a JSON file by a function."""
  content = json.loads(path.read_text())
  edit(content)
  path.write_text(json.dumps(content))


def test_a_set_without_supervised_keys(copy):
  edited(copy / 'dataset_info.json', lambda info: info.pop('supervisedKeys'))
  keys = {'image_key': 'image', 'label_key': 'label'}
  [batch] = take(load(config(copy, '') | keys, 'train'), 1)
  assert (batch['label'] == batch['image'].T % 3).all()
  for wrong in ('', 'labels'):
    words = rf"dataset\.label_key: .*note.*, got '{wrong}'"
    with pytest.raises(errors.ConfigError, match=words):
      load(config(copy, '') | keys | {'label_key': wrong}, 'train')
  with pytest.raises(errors.InvalidDataError, match='Image to Text'):
    load(config(copy, '') | keys | {'label_key': 'note'}, 'train')


def test_images_with_several_labels(images):
  given = config(images, 'many') | {'max_labels': 2}
  data = load(given, 'train')
  assert (data.info.num_classes, data.info.label_shape) == (18_291, (2,))
  *batches, last = data.batches()
  assert last['label'][2:].tolist() == [[-1, -1]] * 2  # padding
  found = np.concatenate([*(b['label'] for b in batches), last['label'][:2]])
  expected = [
    [1000 * i + j if j < i % 3 else -1 for j in range(2)] for i in range(10)
  ]
  assert sorted(found.tolist()) == sorted(expected)
  with pytest.raises(TooManyBadRecordsError, match='2 labels, more than'):
    list(load(given | {'max_labels': 1}, 'train').batches())
  for name, most, kind in (('many', 0, 'several '), ('tiny', 2, '')):
    words = rf'dataset\.max_labels: .* has {kind}ClassLabel, got {most}'
    with pytest.raises(errors.ConfigError, match=words):
      builder.build_source(config(images, name) | {'max_labels': most}, 'train')


def test_an_unlabelled_record_names_its_shard(images):
  shard = rf'tiny-test\.{images.name}-00000'
  words = rf'{shard}.*record 5: label -1 not in \[0, 2\]'
  with pytest.raises(TooManyBadRecordsError, match=words):
    list(load(config(images), 'test').batches())


def test_reading_does_not_import_tensorflow(images):
  given = f"{config(images)!r}, split='train', train=True, seed=0, batch_size=4"
  code = (
    'import sys; from dataset_lib import builder;'
    f'next(builder.build({given}).batches());'
    "sys.exit('tensorflow' in sys.modules)"
  )
  subprocess.run([sys.executable, '-c', code], check=True)


def test_a_damaged_or_missing_shard(copy):
  shard = copy / 'tiny-test.tfrecord-00000'
  whole = shard.read_bytes()
  opened = builder.build_source(config(copy, ''), 'test')
  os.truncate(shard, len(whole) - 5)
  with pytest.raises(errors.BadRecord, match='cut short') as error:
    opened.record(6)
  assert error.value.where == f'{shard}, record 6'
  data = bytearray(whole)
  data[12:60] = bytes(48)  # the first record, behind its length
  shard.write_bytes(data)
  with pytest.raises(TooManyBadRecordsError, match='record 0'):
    list(load(config(copy, ''), 'test').batches())
  os.remove(copy / 'tiny-train.tfrecord-00001')
  with pytest.raises(errors.MissingDataError, match='train'):
    values(copy, name='')


@pytest.mark.parametrize('nested', [False, True])
def test_a_set_cannot_run_code(copy, monkeypatch, nested):
  trace = copy / 'trace'
  (copy / 'evil_module.py').write_text(f"open({str(trace)!r}, 'w')")
  monkeypatch.syspath_prepend(str(copy))

  def edit(content):
    label = content['featuresDict']['features']['label']
    if nested:
      evil = {'type': 'evil_module.Label', 'content': {}}
      label.pop('classLabel')
      label['jsonFeature'] = {'json': json.dumps({'inner': evil})}
    else:
      label['pythonClassName'] = 'evil_module.Label'

  edited(copy / 'features.json', edit)
  by_name = copy.parent / 'sets' / 'tiny' / '1.0.0'
  shutil.copytree(copy, by_name)
  for folder, name in ((copy, ''), (by_name.parents[1], 'tiny')):
    with pytest.raises(errors.InvalidDataError, match=r'would import evil_mod'):
      values(folder, name=name)
  assert not trace.exists()
  assert 'evil_module' not in sys.modules


def glue(root, task, **others):
  return {
    'name': 'glue', 'task': task, 'data_dir': str(root),
    'tokenizer': str(root), 'max_bad_share': 0.1, **others,
  }  # fmt: skip


def rows(root, task, split, **others):
  source = builder.build_source(glue(root, task, **others), split)
  records = [source.record(index) for index in range(len(source))]
  return [(record['tokens'].tolist(), record['label']) for record in records]


def single(number):
  return [2, 4 + number, 24, 3]


def pair(number):
  return single(number) + single(number)[1:]


def test_tasks_of_glue(data_dir):
  # Row 9 has an empty text.
  expected = [(single(n), n % 2) for n in range(20) if n != 9]
  assert rows(data_dir, 'sst2', 'train') == expected
  validation, folder = [(single(0), 1)], data_dir / 'glue' / 'sst2' / '2.0.0'
  assert rows(data_dir, 'sst2', 'validation')[:1] == validation
  by_directory = rows(data_dir, 'sst2', 'dev', data_dir=str(folder))
  assert by_directory[:1] == validation
  assert rows(data_dir, 'mnli', 'train') == [(pair(0), 0), (pair(1), 1)]
  for split, labels in (
    ('validation', [2, 1]), ('validation_mismatched', [0, 2])
  ):  # fmt: skip
    assert [label for _, label in rows(data_dir, 'mnli', split)] == labels
  assert rows(data_dir, 'stsb', 'train') == [(pair(0), 0.5), (pair(1), 4.25)]
  source = builder.build_source(glue(data_dir, 'stsb'), 'train')
  assert source.records(np.arange(2))['label'].dtype == np.float32


def test_a_bad_row_of_glue_is_counted(data_dir, monkeypatch):
  given = glue(data_dir, 'sst2')
  entry = load(given, 'train', train=True).bad_records['empty_text']
  assert entry['count'] == 1
  assert entry['first'][0]['row'] == 9
  assert 'glue-train.tfrecord-00001' in entry['first'][0]['file']
  with pytest.raises(TooManyBadRecordsError, match='text 1 is empty'):
    load(given, 'train')
  whole = rows(data_dir, 'sst2', 'train')
  damage(monkeypatch, 0)  # the first record is like any other
  assert rows(data_dir, 'sst2', 'train') == whole[1:]


def damage(monkeypatch, number):
  read = RecordFiles.__getitem__

  def damaged(examples, row):
    if row == number:
      raise errors.BadRecord('truncated', examples.where(row), 'cut short')
    return read(examples, row)

  monkeypatch.setattr(RecordFiles, '__getitem__', damaged)


def texts(data_dir, name, **options):
  return Texts([f'tfds:{name}'], Faults(), data_dir=str(data_dir), **options)


@pytest.mark.parametrize(
  ('make', 'name', 'split', 'kind', 'words'),
  [
    (config, 'cifar10', 'train', errors.MissingDataError,
     'tfds build cifar10 --data_dir={} --file_format=array_record'),
    (config, 'cifar1o', 'train', errors.ConfigError,
     'dataset.builder: expected a'),
    (config, '', 'train', errors.MissingDataError, 'holds no dataset_info'),
    (config, 'tiny', 'dev', errors.MissingDataError, "split 'dev'; it has "),
    (config, 'tiny', 'all[:50%]', errors.MissingDataError,
     'sums, like train+test'),
    (glue, 'sst2', 'test', errors.ConfigError, 'a split with labels'),
    (glue, 'stsb', 'test', errors.ConfigError, 'a split with labels'),
    (glue, 'stsb', 'validation', errors.MissingDataError,
     "no split 'validation'"),
    (glue, 'qqp', 'train', errors.MissingDataError, 'tfds build glue/qqp'),
    (texts, 'wikipedia/20230601.en', '', errors.MissingDataError,
     'tfds build wikipedia'),
    (texts, 'other', '', errors.InvalidDataError, "expected a feature 'text'"),
  ],
)  # fmt: skip
def test_what_is_no_split(data_dir, make, name, split, kind, words):
  folder = data_dir / 'tfrecord' if make is config else data_dir
  with pytest.raises(kind) as error:
    builder.build_source(make(folder, name), split)
  assert words.format(folder) in str(error.value)
  with pytest.raises(errors.InvalidDataError, match='the columns question'):
    rows(data_dir, 'qnli', 'train', builder='glue/sst2')
  folder = str(data_dir / 'glue' / 'rte' / '2.0.0')
  with pytest.raises(errors.InvalidDataError, match='expected the classes'):
    rows(data_dir, 'rte', 'train', data_dir=folder)


def texts_of(data_dir, name, **options):
  faults, done, found = Faults(), [], texts(data_dir, name, **options)
  stream = list(found.paragraphs(faults, done.append))
  assert 0 < sum(done) <= found.size
  return [paragraph.text for paragraph in stream], stream, faults.summary()


def test_a_record_is_a_document(data_dir, monkeypatch):
  lines, stream, faults = texts_of(data_dir, 'wikipedia/tiny')
  # An empty line is none of its ends, an empty record has no paragraphs.
  assert lines[:6] == ['w0 w1.', 'W2 w3.', '', 'w1 w1.', 'W2 w3.', '']
  assert (len(lines), faults) == (3 * 19 + 1, {})
  assert 'array_record' in stream[0].where
  assert stream[0].where.endswith('record 0, line 1')
  books, *_ = texts_of(data_dir / 'pg19' / '1.0.0', '', wrapped=True)
  assert books == ['w1 w2.', 'W3 w4 w5.', '']
  damage(monkeypatch, 4)
  lines, _, faults = texts_of(data_dir, 'wikipedia/tiny')
  assert len(lines) == 3 * 18 + 1
  [(kind, entry)] = faults.items()
  assert (kind, entry['count']) == ('unreadable_record', 1)
  assert 'record 4' in entry['first'][0]['where']
  assert 'truncated' in entry['first'][0]['message']


def test_a_corpus_of_it(data_dir, tmp_path):
  _, manifest = corpora.prepare(
    tmp_path, [], input=('tfds:wikipedia/tiny',), max_length=16,
    data_dir=str(data_dir), validation_share=0.2,
  )  # fmt: skip
  splits = manifest['splits']
  assert splits['train']['documents'] + splits['validation']['documents'] == 19
  assert splits['train']['sentences'] == 2 * splits['train']['documents']
