"""Texts in TFDS directories, written here, read without TensorFlow."""

import pytest

from dataset_lib import corpus_building, corpus_texts, tfds
from dataset_lib.corpus import Faults
from dataset_lib.corpus_building import Options
from dataset_lib.errors import InvalidDataError, MissingDataError
from tests.dataset_lib import corpora, tfds_marks

pytestmark = tfds_marks.MARKS


@pytest.fixture(scope='module')
def data_dir(tfds_data):
  return tfds_data


def read(data_dir, name, **options):
  texts = corpus_texts.TfdsTexts(name, str(data_dir))
  faults, done = Faults(), []
  stream = list(texts.paragraphs(faults, done.append, **options))
  assert 0 < sum(done) <= texts.size
  return [paragraph.text for paragraph in stream], stream, faults.summary()


def test_a_record_is_a_document(data_dir):
  texts, stream, faults = read(data_dir, 'wikipedia/tiny')
  # An empty line is none of its ends, an empty record has no paragraphs.
  assert texts[:6] == ['w0 w1.', 'W2 w3.', '', 'w1 w1.', 'W2 w3.', '']
  assert len(texts) == 3 * 19 + 1
  assert 'array_record' in stream[0].where
  assert stream[0].where.endswith('record 0, line 1')
  assert not faults


def test_books_are_wrapped(data_dir):
  texts, _, _ = read(data_dir / 'pg19' / '1.0.0', '', wrapped=True)
  assert texts == ['w1 w2.', 'W3 w4 w5.', '']


def test_a_damaged_record_is_counted(data_dir, monkeypatch):
  read_record = tfds.Examples.__getitem__

  def damaged(self, number):
    from dataset_lib.errors import BadRecord

    if number == 4:
      raise BadRecord('truncated', '', 'expected 9 bytes, got 3')
    return read_record(self, number)

  monkeypatch.setattr(tfds.Examples, '__getitem__', damaged)
  texts, _, faults = read(data_dir, 'wikipedia/tiny')
  assert len(texts) == 3 * 18 + 1
  entry = faults['unreadable_record']
  assert entry['count'] == 1
  assert 'record 4' in entry['first'][0]['where']
  assert 'truncated' in entry['first'][0]['message']


def test_what_is_not_prepared(data_dir, tmp_path):
  with pytest.raises(MissingDataError, match='tfds build wikipedia'):
    corpus_texts.TfdsTexts('wikipedia/20230601.en', str(tmp_path))
  with pytest.raises(InvalidDataError, match="expected a feature 'text'"):
    corpus_texts.TfdsTexts('other', str(data_dir))


def test_a_corpus_of_it(data_dir, tmp_path):
  options = Options(
    ('tfds:wikipedia/tiny',),
    tokenizer=str(corpora.tokenizer(tmp_path / 'vocabulary')),
    max_length=16,
    data_dir=str(data_dir),
    validation_share=0.2,
  )
  manifest = corpus_building.prepare(
    tmp_path / 'out', options, corpora.no_progress
  )
  splits = manifest['splits']
  assert splits['train']['documents'] + splits['validation']['documents'] == 19
  assert splits['train']['sentences'] == 2 * splits['train']['documents']
