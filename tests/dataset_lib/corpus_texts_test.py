"""Text files with everything that can be wrong with them."""

import gzip
import itertools
import os
import tracemalloc

import pytest

from dataset_lib import corpus_texts
from dataset_lib.corpus import ACTIONS, SHOWN_PER_KIND, Faults
from dataset_lib.errors import MissingDataError


def read(*files, max_line=corpus_texts.MAX_LINE, wrapped=False):
  """(documents as lists of paragraphs, {kind: its entry}, bytes done)."""
  faults, done = Faults(), []
  stream = itertools.chain.from_iterable(
    corpus_texts.Texts([str(file)], faults).paragraphs(
      faults, done.append, wrapped, max_line
    )
    for file in files
  )
  documents = [[]]
  for paragraph in stream:
    if paragraph.text:
      documents[-1].append(paragraph.text)
    else:
      documents.append([])
  return [d for d in documents if d], faults.summary(), sum(done)


def first(faults, kind):
  entry = faults.pop(kind)
  assert entry['action'] == ACTIONS[kind]
  return (
    entry['count'],
    entry['first'][0]['where'],
    entry['first'][0]['message'],
  )


@pytest.fixture
def file(tmp_path):
  return tmp_path / 'a.txt'


@pytest.mark.parametrize('end', [b'\n', b'\r\n'])
@pytest.mark.parametrize('suffix', ['.txt', '.txt.gz'])
def test_paragraphs_and_documents(tmp_path, end, suffix):
  file = tmp_path / f'a{suffix}'
  data = end.join([b'', b'One.  Two.', b' three', b' \t', b'', 'é'.encode()])
  file.write_bytes(gzip.compress(data) if suffix == '.txt.gz' else data)
  documents, faults, done = read(file, file)
  assert documents == [['One.  Two.', 'three'], ['é']] * 2
  assert not faults
  assert done == 2 * file.stat().st_size


def test_wrapped_lines_are_joined(file):
  file.write_text('a\nb\n\n\nc\nd\n')
  assert read(file, wrapped=True)[0] == [['a b', 'c d']]
  assert read(file)[0] == [['a', 'b'], ['c', 'd']]
  file.write_text('aaaa\n' * 5)
  whole = read(file, wrapped=True, max_line=10)[0]
  assert whole == [['aaaa aaaa aaaa', 'aaaa aaaa']]


def test_broken_bytes_are_replaced(file):
  file.write_bytes(b'fine\ncaf\xe9 \xff\n\xe2\x82\nfine')
  documents, faults, _ = read(file)
  assert documents == [['fine', 'caf\ufffd \ufffd', '\ufffd', 'fine']]
  count, where, message = first(faults, 'broken_bytes')
  assert (count, where) == (2, f'{file}, line 2')
  assert message.startswith('byte 3 of the line')
  assert not faults


def test_nul_bytes_and_the_mark_are_removed(file):
  file.write_bytes(b'\xef\xbb\xbfone\0two\n\0\0\n\xef\xbb\xbfx')
  documents, faults, _ = read(file)
  # A line of NUL bytes alone is an empty one.
  assert documents == [['onetwo'], ['\ufeffx']]
  assert first(faults, 'nul_bytes')[:2] == (2, f'{file}, line 1')
  assert first(faults, 'byte_order_mark')[:2] == (1, f'{file}, line 1')
  assert not faults


@pytest.mark.parametrize('data', [b'', b'\n\n \n', b'\0\0'])
def test_a_file_without_text(file, data):
  file.write_bytes(data)
  documents, faults, _ = read(file)
  assert not documents
  assert first(faults, 'empty_file')[:2] == (1, str(file))


@pytest.mark.parametrize('encoding', ['utf-16', 'utf-16-be'])
@pytest.mark.parametrize('suffix', ['.txt', '.txt.gz'])
def test_another_encoding(tmp_path, encoding, suffix):
  file = tmp_path / f'a{suffix}'
  data = ('' if encoding == 'utf-16' else '\ufeff') + 'text\n'
  data = data.encode(encoding)
  file.write_bytes(gzip.compress(data) if suffix == '.txt.gz' else data)
  documents, faults, _ = read(file)
  assert not documents
  assert first(faults, 'not_utf8_file')[:2] == (1, str(file))
  assert not faults


def test_a_truncated_gzip_is_read_as_far_as_it_goes(tmp_path):
  file = tmp_path / 'a.txt.gz'
  lines = [f'line {number} {number**7}' for number in range(3000)]
  data = gzip.compress('\n'.join(lines).encode())
  file.write_bytes(data[: len(data) // 2])
  (document,), faults, _ = read(file)
  assert 500 < len(document) < 2500
  # The last line may be cut.
  assert document[:-1] == lines[: len(document) - 1]
  assert first(faults, 'truncated_gzip')[:2] == (1, str(file))


def test_a_damaged_gzip(tmp_path):
  file, good = tmp_path / 'a.txt.gz', tmp_path / 'b.txt'
  good.write_text('good')
  for data in (b'no gzip', gzip.compress(b'x' * 9)[:-6] + b'abcdef'):
    file.write_bytes(data)
    documents, faults, _ = read(file, good)
    assert documents[-1] == ['good']
    assert first(faults, 'damaged_gzip')[:2] == (1, str(file))


def test_what_cannot_be_opened(tmp_path):
  link, pipe = tmp_path / 'a.txt', tmp_path / 'b.txt'
  link.symlink_to(tmp_path / 'nowhere')
  os.mkfifo(pipe)
  documents, faults, _ = read(link, pipe)
  assert not documents
  assert first(faults, 'unreadable_file')[:2] == (2, str(link))


def test_an_error_while_reading(file, monkeypatch):
  file.write_text('one\ntwo\n')
  pieces = corpus_texts.pieces

  def breaking(stream, max_line):
    yield next(pieces(stream, max_line))
    raise OSError(5, 'Input/output error')

  monkeypatch.setattr(corpus_texts, 'pieces', breaking)
  documents, faults, _ = read(file)
  assert documents == [['one']]
  assert 'Input/output error' in first(faults, 'unreadable_file')[2]


@pytest.mark.parametrize(
  ('data', 'expected'),
  [
    (b'aaa bbb ccc ddd eee', [b'aaa bbb ', b'ccc ddd ', b'eee']),
    (b'a' * 25, [b'a' * 9, b'a' * 9, b'a' * 7]),
    # 3 bytes a character: no cut inside of one.
    ('€'.encode() * 8, ['€'.encode() * 3, '€'.encode() * 3, '€'.encode() * 2]),
    (b'\x80' * 21, [b'\x80' * 10, b'\x80' * 10, b'\x80']),
    (b'aaaaaaaaa\nb', [b'aaaaaaaaa\n', b'b']),
  ],
)
def test_long_lines_are_cut(data, expected, tmp_path):
  file = tmp_path / 'a.txt'
  file.write_bytes(data)
  with file.open('rb') as stream:
    got = [piece.data for piece in corpus_texts.pieces(stream, 10)]
  assert got == expected
  assert b''.join(got) == data


def test_a_long_line_is_one_document_and_counted_once(file):
  words = ['ab'] * 50
  file.write_text('x\n' + ' '.join(words) + '\n' + ' ' * 100 + '\nlast')
  (document,), faults, _ = read(file, max_line=16)
  assert ' '.join(document) == ' '.join(['x', *words, 'last'])
  assert max(map(len, document)) <= 16
  # The line of spaces is a long one, too, and no empty one.
  assert first(faults, 'long_line')[:2] == (2, f'{file}, line 2')


@pytest.mark.parametrize('size', [4, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize('unit', [b'word ', b'x', b'\0', b'\xff'])
def test_a_line_of_many_megabytes_takes_little_memory(file, size, unit):
  chunk = unit * (2**20 // len(unit))
  with file.open('wb') as out:
    for _ in range(size):
      out.write(chunk)
  tracemalloc.start()
  try:
    length = faults = 0
    counts = Faults()
    texts = corpus_texts.Texts([str(file)], counts)
    stream = texts.paragraphs(counts, lambda done: None, max_line=2**18)
    for paragraph in stream:
      length += len(paragraph.text)
    faults = counts.summary()
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  # A few copies of a piece of 256 KiB, as characters of up to 4 bytes.
  assert peak < 4 * 2**20
  assert faults['long_line']['count'] == 1
  if unit != b'\0':
    assert length > 0.75 * size * 2**20


def test_the_search_for_files(tmp_path):
  for name in ('b/2.txt', 'b/1.txt.gz', 'a.txt', 'b.c/3.txt', 'note.md'):
    (tmp_path / 'in' / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / 'in' / name).write_text('x')
  (tmp_path / 'in' / 'link').symlink_to(tmp_path)
  (tmp_path / 'z.text').write_text('x')
  faults = Faults()
  inputs = [str(tmp_path / 'z.text'), str(tmp_path / 'in')]
  found = corpus_texts.find(inputs, faults)
  names = [str(file.relative_to(tmp_path)) for file in found]
  assert names == [
    'z.text', 'in/a.txt', 'in/b/1.txt.gz', 'in/b/2.txt', 'in/b.c/3.txt'
  ]  # fmt: skip
  assert set(faults.summary()) == {'other_file', 'linked_folder'}
  with pytest.raises(MissingDataError, match='no file or folder'):
    corpus_texts.find([str(tmp_path / 'nowhere')], faults)
  (tmp_path / 'empty').mkdir()
  with pytest.raises(MissingDataError, match='no text in'):
    corpus_texts.find([str(tmp_path / 'empty')], faults)


def test_names_that_are_no_text():
  assert (
    corpus_texts.printable(b'/a/\xff.txt'.decode('utf-8', 'surrogateescape'))
    == '/a/\ufffd.txt'
  )


def test_only_the_first_of_a_kind_are_named():
  faults = Faults()
  for number in range(100):
    faults.add('long_line', f'line {number}')
  entry = faults.summary()['long_line']
  assert entry['count'] == 100
  assert len(entry['first']) == SHOWN_PER_KIND
  assert not faults.files
  assert entry['first'][0]['where'] == 'line 0'
