"""Text files with everything that can be wrong with them."""

import gzip
import itertools
import os
import tracemalloc

import pytest

from core.errors import MissingDataError
from dataset_lib.corpus.texts import ACTIONS, Faults, Texts


def read(*files, **options):
  """(documents as lists of paragraphs, {kind: its entry}, bytes done)."""
  faults, done = Faults(), []
  texts = Texts([str(file) for file in files], faults, **options)
  stream = [p.text for p in texts.paragraphs(faults, done.append)]
  groups = itertools.groupby(stream, bool)
  documents = [list(group) for is_text, group in groups if is_text]
  return documents, faults.summary(), sum(done)


@pytest.fixture
def file(tmp_path):
  return tmp_path / 'a.txt'


UTF16 = '\ufefftext\n'.encode('utf-16-be')
# Bytes, documents, and {kind of fault: (count, line of the first or '')}.
FAULTS = {
  'broken': (
    b'fine\ncaf\xe9 \xff\n\xe2\x82\nfine',
    [['fine', 'caf\ufffd \ufffd', '\ufffd', 'fine']],
    {'broken_bytes': (2, ', line 2')},
  ),
  # A line of NUL bytes alone is an empty one.
  'nul and mark': (
    b'\xef\xbb\xbfone\0two\n\0\0\n\xef\xbb\xbfx',
    [['onetwo'], ['\ufeffx']],
    {'nul_bytes': (2, ', line 1'), 'byte_order_mark': (1, ', line 1')},
  ),
  'empty': (b'', [], {'empty_file': (1, '')}),
  'blank': (b'\n\n \n', [], {'empty_file': (1, '')}),
  'nul only': (
    b'\0\0', [], {'empty_file': (1, ''), 'nul_bytes': (1, ', line 1')}
  ),
  'utf-16': ('text\n'.encode('utf-16'), [], {'not_utf8_file': (1, '')}),
  'utf-16.gz': (gzip.compress(UTF16), [], {'not_utf8_file': (1, '')}),
  'not gzip.gz': (b'no gzip', [], {'damaged_gzip': (1, '')}),
  'wrong sum.gz': (
    gzip.compress(b'x' * 9)[:-6] + b'abcdef', [], {'damaged_gzip': (1, '')}
  ),
}  # fmt: skip


def places(faults):
  """{kind: (count, place of the first)}; each has an action."""
  assert faults.keys() <= ACTIONS.keys()
  return {k: (x['count'], x['first'][0]['where']) for k, x in faults.items()}


@pytest.mark.parametrize('name', FAULTS)
def test_damaged_text_is_repaired_or_left_out_and_named(tmp_path, name):
  data, texts, kinds = FAULTS[name]
  end = '.txt.gz' if name.endswith('gz') else '.txt'
  file, good = tmp_path / f'a{end}', tmp_path / 'b.txt'
  file.write_bytes(data)
  good.write_text('good')
  documents, faults, _ = read(file, good)
  assert documents == [*texts, ['good']]
  expected = {k: (n, f'{file}{place}') for k, (n, place) in kinds.items()}
  assert places(faults) == expected


def test_a_truncated_gzip_is_read_as_far_as_it_goes(tmp_path):
  file, lines = tmp_path / 'a.txt.gz', [f'line {n} {n**7}' for n in range(3000)]
  data = gzip.compress('\n'.join(lines).encode())
  file.write_bytes(data[: len(data) // 2])
  (document,), faults, _ = read(file)
  assert 500 < len(document) < 2500
  # The last line may be cut.
  assert document[:-1] == lines[: len(document) - 1]
  assert places(faults) == {'truncated_gzip': (1, str(file))}


def test_what_cannot_be_opened(tmp_path):
  link = tmp_path / 'a.txt'
  link.symlink_to(tmp_path / 'nowhere')
  os.mkfifo(tmp_path / 'b.txt')
  documents, faults, _ = read(tmp_path)
  assert not documents
  assert places(faults) == {'unreadable_file': (2, str(link))}


@pytest.mark.parametrize('end', [b'\n', b'\r\n'])
@pytest.mark.parametrize('suffix', ['.txt', '.txt.gz'])
def test_paragraphs_and_documents(tmp_path, end, suffix):
  file = tmp_path / f'a{suffix}'
  data = end.join([b'', b'One.  Two.', b' three', b' \t', b'', 'é'.encode()])
  file.write_bytes(gzip.compress(data) if suffix == '.txt.gz' else data)
  documents, faults, done = read(file)
  assert documents == [['One.  Two.', 'three'], ['é']]
  assert not faults
  assert done == file.stat().st_size


def test_wrapped_lines_are_joined(file):
  file.write_text('a\nb\n\n\nc\nd\n')
  assert read(file, wrapped=True)[0] == [['a b', 'c d']]
  assert read(file)[0] == [['a', 'b'], ['c', 'd']]
  file.write_text('aaaa\n' * 5)
  whole = read(file, wrapped=True, max_line=10)[0]
  assert whole == [['aaaa aaaa aaaa', 'aaaa aaaa']]


def test_an_error_while_reading(file, monkeypatch):
  file.write_text('one\ntwo\n')
  lines = Texts.lines

  def breaking(*arguments):
    yield next(lines(*arguments))
    raise OSError(5, 'Input/output error')

  monkeypatch.setattr(Texts, 'lines', breaking)
  documents, faults, _ = read(file)
  assert documents == [['one']]
  (shown,) = faults['unreadable_file']['first']
  assert 'Input/output error' in shown['message']


@pytest.mark.parametrize(
  ('data', 'expected'),
  [
    (b'aaa bbb ccc ddd eee', ['aaa bbb', 'ccc ddd', 'eee']),
    (b'a' * 25, ['a' * 10, 'a' * 10, 'a' * 5]),
    # No cut inside of a character.
    ('€'.encode() * 12, ['€' * 10, '€€']),
    (b'\x80' * 21, ['\ufffd' * 10, '\ufffd' * 10, '\ufffd']),
    (b'aaaaaaaaa\nb', ['aaaaaaaaa', 'b']),
  ],
)
def test_long_lines_are_cut(data, expected, file):
  file.write_bytes(data)
  assert read(file, max_line=10)[0] == [expected]


def test_a_long_line_is_one_document_and_counted_once(file):
  words = ['ab'] * 50
  file.write_text('x\n' + ' '.join(words) + '\n' + ' ' * 100 + '\nlast')
  (document,), faults, _ = read(file, max_line=16)
  assert ' '.join(document) == ' '.join(['x', *words, 'last'])
  assert max(map(len, document)) <= 16
  # The line of spaces is a long one, too, and no empty one.
  assert places(faults) == {'long_line': (2, f'{file}, line 2')}


@pytest.mark.parametrize('size', [4, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize('unit', [b'word ', b'x', b'\0', b'\xff'])
def test_a_line_of_many_megabytes_takes_little_memory(file, size, unit):
  chunk = unit * (2**20 // len(unit))
  with file.open('wb') as out:
    for _ in range(size):
      out.write(chunk)
  faults = Faults()
  tracemalloc.start()
  try:
    texts = Texts([str(file)], faults, max_line=2**18)
    stream = texts.paragraphs(faults, lambda done: None)
    length = sum(len(paragraph.text) for paragraph in stream)
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  # A few copies of a piece of 256 KiB, as characters of up to 4 bytes.
  assert peak < 4 * 2**20
  assert faults.summary()['long_line']['count'] == 1
  if unit != b'\0':
    assert length > 0.75 * size * 2**20


def test_the_search_for_files(tmp_path):
  for name in ('b/2.txt', 'b/1.txt.gz', 'a.txt', 'b.c/3.txt', 'note.md'):
    (tmp_path / 'in' / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / 'in' / name).write_text('x')
  (tmp_path / 'in' / 'link').symlink_to(tmp_path)
  (tmp_path / 'z.text').write_text('x')
  faults = Faults()
  (tmp_path / 'again').symlink_to(tmp_path / 'in' / 'b')
  names = 'z.text', 'in', 'again', 'in/a.txt'
  found = Texts([str(tmp_path / name) for name in names], faults).names
  names = [os.path.relpath(file, tmp_path) for file in found]
  assert names == [
    'z.text', 'in/a.txt', 'in/b/1.txt.gz', 'in/b/2.txt', 'in/b.c/3.txt'
  ]  # fmt: skip
  # What is named twice is read once.
  counts = {kind: entry['count'] for kind, entry in faults.summary().items()}
  assert counts == {'other_file': 1, 'linked_folder': 1, 'repeated_file': 3}
  assert faults.files[-1]['where'] == f'{tmp_path}/in/a.txt'
  with pytest.raises(MissingDataError, match='no file or folder'):
    Texts([str(tmp_path / 'nowhere')], faults)
  (tmp_path / 'empty').mkdir()
  with pytest.raises(MissingDataError, match='no text in'):
    Texts([str(tmp_path / 'empty')], faults)
