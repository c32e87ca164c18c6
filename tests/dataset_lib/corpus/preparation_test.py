"""Corpora prepared from hand-made texts: what is in them, and how they fail."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from core.errors import InvalidDataError, MissingDataError
from dataset_lib import tokenizer
from dataset_lib.corpus import packing, preparation
from tests.dataset_lib import corpora


def names_of(directory, split):
  """The tokens by name, and the split's arrays."""
  arrays = preparation.open_split(directory, split)
  return tokenizer.load(directory).names(arrays.tokens.tolist()), arrays


def pieces(paragraphs):
  """What a document must become: its words, lower case, and full stops."""
  given = []
  for word in ' '.join(paragraphs).lower().replace('.', ' .').split():
    stem = word.rstrip('ab')
    given += [stem, *(f'##{letter}' for letter in word[len(stem) :])]
  return given


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """(directory, manifest, documents)."""
  texts = corpora.documents(60)
  root = tmp_path_factory.mktemp('prepared')
  return *corpora.prepare(root, texts), texts


def test_every_token_is_in_its_place(prepared):
  directory, manifest, texts = prepared
  train, train_arrays = names_of(directory, 'train')
  places = {'train': 0, 'validation': 0}
  read = {split: names_of(directory, split) for split in places}
  for number, paragraphs in enumerate(texts):
    wanted = pieces(paragraphs)
    at = places['train']
    is_train = number and train[at : at + len(wanted)] == wanted
    split = 'train' if is_train else 'validation'
    (names, arrays), at = read[split], places[split]
    assert names[at : at + len(wanted)] == wanted
    assert at in arrays.rows  # no row has tokens of two documents
    places[split] += len(wanted)
  assert places == {split: len(names) for split, (names, _) in read.items()}
  assert train_arrays.tokens.dtype == np.uint16
  counts = manifest['splits']['train']
  assert counts['tokens'] == len(train)
  assert counts['words'] == sum(not name.startswith('##') for name in train)
  # One document out of ten, the first one included.
  assert manifest['splits']['validation']['documents'] == 6
  assert counts['documents'] == counts['documents_with_rows'] == 54
  assert counts['unknown_tokens'] == 0
  assert manifest['inputs'] == (str(directory.parent / 'in'),)
  sizes = np.diff(train_arrays.rows)
  assert sizes.min() >= 2
  assert sizes.max() == 29
  # Every sentence ends in a full stop, and only there.
  ends = np.roll(train_arrays.sentences, -1)
  is_stop = train_arrays.tokens == corpora.VOCABULARY.index('.')
  np.testing.assert_array_equal(is_stop, ends)


@pytest.mark.parametrize('size', [50, 700])
def test_blocks_do_not_show_but_in_their_rows(tmp_path, size, monkeypatch):
  texts = corpora.documents(25, seed=1)
  whole, manifest = corpora.prepare(tmp_path, texts, 'whole')
  monkeypatch.setattr(packing, 'BLOCK_CHARACTERS', size)
  parts, other = corpora.prepare(tmp_path, texts, 'parts')
  for split in preparation.SPLITS:
    assert names_of(whole, split)[0] == names_of(parts, split)[0]
    one, two = manifest['splits'][split], other['splits'][split]
    assert {**one, 'rows': 0} == {**two, 'rows': 0}
    assert one['rows'] <= two['rows']
    sentences = [names_of(out, split)[1].sentences for out in (whole, parts)]
    np.testing.assert_array_equal(*sentences)


def test_the_same_bytes_whatever_the_number_of_processes(tmp_path, monkeypatch):
  monkeypatch.setattr(packing, 'BLOCK_CHARACTERS', 500)
  texts = corpora.documents(40, seed=2)
  options = {'tokenizer': '', 'vocab_size': 60, 'vocab_texts': 500}
  one, two = (
    corpora.prepare(tmp_path, texts, str(n), processes=n, **options)[0]
    for n in (1, 2)
  )
  files = [path.relative_to(one) for path in one.rglob('*.*')]
  assert len(files) == len(list(two.rglob('*.*'))) == 8
  for file in files:
    assert (one / file).read_bytes() == (two / file).read_bytes(), file


def test_the_vocabulary_is_trained_from_the_training_split(tmp_path):
  texts = corpora.documents(30, seed=3)
  # The first document is held out; its letters are nowhere else.
  texts[0] = ['Xyzzy xyzzy zyx. ' * 30]
  options = dict(tokenizer='', vocab_size=50, vocab_texts=500)
  out, _ = corpora.prepare(tmp_path, texts, **options)
  given = tokenizer.load(out)
  assert not any('z' in name for name in given.names(range(5, 50)))
  _, arrays = names_of(out, 'validation')
  assert (arrays.tokens[arrays.rows[0] : arrays.rows[1]] == 1).any()


def test_validation_texts_are_not_trained_on(tmp_path):
  texts = corpora.documents(12, seed=4)
  folder = corpora.write(tmp_path / 'in', texts)
  held_out = folder / 'held_out.txt'
  held_out.write_text('w1 w2. W3 w4 w5.\n')
  given = dict(validation=(str(held_out),), validation_share=0.01)
  out, manifest = corpora.prepare(tmp_path, texts, **given)
  assert names_of(out, 'validation')[0] == pieces(['w1 w2. w3 w4 w5.'])
  assert manifest['splits']['train']['documents'] == 12
  out, manifest = corpora.prepare(tmp_path, texts, 'no', validation_share=0.0)
  assert list(manifest['splits']) == ['train']
  with pytest.raises(MissingDataError, match='--validation_share'):
    preparation.open_split(out, 'validation')
  with pytest.raises(MissingDataError, match=r'launch\.prepare_corpus'):
    preparation.open_split(tmp_path, 'train')


def test_faults_are_counted_and_named(tmp_path):
  folder = tmp_path / 'in'
  folder.mkdir()
  (folder / '1.txt').write_bytes(b'w1 w2. W3 w\xff4.\n\nw5\n\nw6 w7 w8.\n')
  (folder / '3.txt').write_bytes(b'w1\0 w2. W3.')
  for name in ('note.md', '2.txt', *(f'{n}.txt' for n in range(4, 10))):
    (folder / name).touch()
  out, manifest = corpora.prepare(tmp_path, [['W1 w2. W3 w4.']] * 3,
                                  validation_share=0.0)  # fmt: skip
  faults = manifest['faults']
  assert {kind: entry['count'] for kind, entry in faults.items()} == {
    'broken_bytes': 1, 'empty_file': 7, 'nul_bytes': 1,
    'one_sentence_document': 1, 'other_file': 1, 'too_short': 1,
  }  # fmt: skip
  named = {kind: entry['first'][0]['where'] for kind, entry in faults.items()}
  assert named['broken_bytes'] == f'{folder}/1.txt, line 1'
  assert named['too_short'] == f'{folder}/1.txt, line 3'
  assert named['one_sentence_document'] == f'{folder}/1.txt, line 5'
  assert len(faults['empty_file']['first']) == 5
  assert json.loads((out / 'corpus.json').read_text())['faults'] == faults
  # Of whole files all are named.
  lines = (out / 'faults.jsonl').read_text().splitlines()
  files = [json.loads(line) for line in lines]
  assert [set(file) for file in files] == [{'kind', 'where', 'message'}] * 8
  names = [pathlib.Path(file['where']).stem for file in files]
  assert names == ['note', *'2456789']
  counts = manifest['splits']['train']
  assert counts['documents'] == counts['documents_with_rows'] + 1
  # "w\ufffd4" is cleaned by BERT's normalizer to "w4".
  assert names_of(out, 'train')[0][:6] == pieces(['w1 w2. w3 w4.'])


@pytest.mark.parametrize('is_link', [False, True])
def test_a_directory_is_complete_or_absent(tmp_path, is_link):
  out = tmp_path / 'out'
  if is_link:
    (tmp_path / 'real').mkdir()
    out.symlink_to('real')
  with preparation.complete_or_absent(out) as folder:
    place = folder.parent
    assert place.parent == tmp_path
    (unfinished,) = preparation.leftovers(out.resolve())
    assert unfinished == place
    assert out.exists() is is_link
    (folder / 'x').touch()
  assert (out / 'x').exists()
  assert out.is_symlink() is is_link
  assert not place.exists()
  (tmp_path / 'made').mkdir()
  assert out.stat().st_mode == (tmp_path / 'made').stat().st_mode


@pytest.mark.parametrize(
  ('name', 'data', 'words'),
  [
    ('corpus.json', b'{"format": 2}', r'corpus\.json is damaged.*max_length'),
    ('corpus.json', b'{"format": 2, "max_length": 32, "vocab_size": "208"}',
     r'corpus\.json is damaged.*integer'),
    ('corpus.json', b'{"format": 1}', 'expected format 2, got 1'),
    ('train/rows.bin', b'', r'rows\.bin is damaged'),
    ('train/tokens.bin', None,
     r'tokens\.bin is damaged.*No such file.*; prepare the'),
    ('train/sentences.bin', b'\1', r'sentences\.bin .*\d+ of bool, got 1;'),
    ('train/tokens.bin', lambda data: data * 4,
     r'tokens\.bin .*expected \d+ of uint16, got'),
    ('train/rows.bin', lambda data: data[:-8] + data[:8],
     r'rows\.bin is.*expected rows of 2 to 29'),
    ('train/rows.bin', lambda data: data[:80] + data[:8] + data[88:],
     r'rows\.bin .* rows of 2 to 29 tokens.*prepare the corpus'),
  ],
)  # fmt: skip
def test_damaged_corpora_are_named(prepared, tmp_path, name, data, words):
  directory = tmp_path / 'copy'
  shutil.copytree(prepared[0], directory)
  path = directory / name
  if data is None:
    path.unlink()
  else:
    path.write_bytes(data(path.read_bytes()) if callable(data) else data)
  with pytest.raises((InvalidDataError, MissingDataError), match=words):
    preparation.open_split(directory, 'train')


def test_opening_reads_nothing(prepared):
  for base in preparation.open_split(prepared[0], 'train')[:3]:
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
      base = base.base
    assert isinstance(base, np.memmap)
