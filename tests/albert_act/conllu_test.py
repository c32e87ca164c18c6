"""CoNLL-U: sentences, faults by line, a real treebank."""

import gzip

import pytest

from albert_act import conllu
from albert_act.conllu import Word
from dataset_lib.errors import InvalidDataError
from tests.dataset_lib.word_rows import write


def line(number, form, head, label, upos='X'):
  columns = [number, form, form.lower(), upos, '_', '_', head, label, '_', '_']
  return '\t'.join(map(str, columns))


GOOD = [
  '# sent_id = first',
  "# text = Zoé didn't.",
  line(1, 'Zoé', 2, 'nsubj:pass', 'PRON'),
  "2-3\tdidn't" + '\t_' * 8,
  line(2, 'did', 0, 'root', 'AUX'),
  line(3, "n't", 2, 'advmod', 'PART'),
  '3.1\tsleep\tsleep\tVERB' + '\t_' * 6,
  line(4, '.', 2, 'punct', '_'),
  '',
]
OTHER = [line(1, 'Ten thousand', 0, 'root'), '']


@pytest.mark.parametrize('end', ['\n', '\r\n'])
@pytest.mark.parametrize('name', ['a.conllu', 'a.conllu.gz'])
def test_words_of_the_tree(tmp_path, name, end):
  rows = ['\ufeff' + GOOD[0], *GOOD[1:], '', *OTHER]
  (first, second), bad = conllu.read(write(tmp_path / name, rows, end))
  assert bad == []
  assert first == (
    Word('Zoé', 2, 'nsubj:pass'),
    Word('did', 0, 'root'),
    Word("n't", 2, 'advmod'),
    Word('.', 2, 'punct'),
  )
  assert [word.universal_label for word in first[::3]] == ['nsubj', 'punct']
  assert second == (Word('Ten thousand', 0, 'root'),)
  # An empty node first; a file whose last line has no end.
  empty = '0.1\tit' + '\t_' * 8
  path = write(tmp_path / 'b.conllu', [*OTHER, empty, *GOOD[2:-1]])
  path.write_bytes(path.read_bytes().removesuffix(b'\n'))
  sentences, bad = conllu.read(path)
  assert [len(sentence) for sentence in sentences] == [1, 4]
  assert bad == []


LONG = '9' * 5000
# (line of GOOD, what replaces it, kind of the fault, words of its message)
BROKEN = [
  (4, b'2\tdid\xff\t_\t_\t_\t_\t0\troot\t_\t_', 'not_utf8', 'decode'),
  (2, '1\tZoé\tzoé', 'wrong_columns', 'expected 10 columns, got 3'),
  (3, '2-3\tdidn\'t\t_', 'wrong_columns', 'expected 10 columns, got 3'),
  (2, line(1, ' ', 2, 'nsubj'), 'empty_form', 'expected a form'),
  (7, line(4, '.', 2, '_'), 'no_label', "got '_'"),
  (5, line('3a', "n't", 2, 'advmod'), 'illegal_id', "got '3a'"),
  (5, line(LONG, "n't", 2, 'advmod'), 'illegal_id', "got '999"),
  (5, line('03', "n't", 2, 'advmod'), 'illegal_id', "got '03'"),
  (2, line('0', 'Zoé', 2, 'nsubj'), 'illegal_id', "got '0'"),
  *(
    (7, line(4, '.', head, 'punct'), 'illegal_head', 'the number of a head')
    for head in ('_', LONG, '²', -1)
  ),
  (7, line(4, '.', 5, 'punct'), 'illegal_head', 'got 5'),
  (7, line(4, '.', 4, 'punct'), 'illegal_head', 'got 4'),
  (7, line(5, '.', 2, 'punct'), 'wrong_order', 'expected number 4, got 5'),
  (7, line(3, '.', 2, 'punct'), 'wrong_order', 'expected number 4, got 3'),
]  # fmt: skip


@pytest.mark.parametrize(('place', 'text', 'kind', 'message'), BROKEN)
def test_a_broken_line_is_named_and_its_sentence_left_out(
  tmp_path, place, text, kind, message
):
  broken = [*GOOD[:place], text, *GOOD[place + 1 :]]
  path = write(tmp_path / 'a.conllu', [*OTHER, *broken, *GOOD])
  sentences, bad = conllu.read(path)
  assert [len(sentence) for sentence in sentences] == [1, 4]
  # The lines after it are not to blame.
  assert [fault.kind for fault in bad] == [kind]
  assert bad[0].where == f'{path}, line {place + 3}'
  assert message in bad[0].message


@pytest.mark.parametrize(
  ('rows', 'faults'),
  [
    ([GOOD[2], 'x', 'y', line(4, '.', 2, '_')],
     ['2: expected 10', '3: expected 10', '4: expected a dep']),
    *(
      ([line(1, 'a', *heads[:1], 'x'), line(2, 'b', *heads[1:], 'x')],
       [f'1: expected one root, got {heads.count(0)}'])
      for heads in ((2, 1), (0, 0))
    ),
    (['# sent_id = nothing'], ['1: expected a word']),
  ],
)  # fmt: skip
def test_faults_of_sentences(tmp_path, rows, faults):
  path = write(tmp_path / 'a.conllu', [*rows, '', *OTHER])
  sentences, bad = conllu.read(path)
  assert len(sentences) == 1
  for fault, expected in zip(bad, faults, strict=True):
    number, _, words = expected.partition(': ')
    assert fault.where == f'{path}, line {number}'
    assert fault.message.startswith(words)


DAMAGED = gzip.compress('\n'.join(GOOD * 20).encode())[:-20]


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('a.conllu', b'', 'is empty'),
    ('a.conllu', b'\n\n', 'is empty'),
    ('a.conllu', b'Just some text.\n',
     'none of its 1 can be used; the first: wrong_col'),
    ('a.conllu', b'\x00\xff\n\n\x80\n',
     'none of its 2 can be used; the first: '),
    ('a.conllu.gz', DAMAGED, 'damaged or cut short'),
  ],
)  # fmt: skip
def test_files_that_are_no_treebank(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(InvalidDataError, match=message):
    conllu.read(tmp_path / name)
  with pytest.raises(FileNotFoundError):
    conllu.read(tmp_path / 'missing.conllu')


@pytest.mark.parametrize(
  ('name', 'count'),
  [
    ('dev', 1501),
    pytest.param('test', 1558, marks=pytest.mark.slow),
    pytest.param('train', 12544, marks=pytest.mark.nightly),
  ],
)
def test_the_real_treebank_is_all_good(shared_data, name, count):
  path = shared_data('ud_english_ewt', f'{name}.conllu.gz')
  sentences, bad = conllu.read(path)
  assert bad == []
  assert len(sentences) == count
  # Against the lines themselves.
  numbered = [
    line.split('\t')
    for line in gzip.decompress(path.read_bytes()).decode().split('\n')
    if line.partition('\t')[0].isdigit()
  ]
  words = [word for sentence in sentences for word in sentence]
  assert [word.form for word in words] == [line[1] for line in numbered]
  assert [word.label for word in words] == [line[7] for line in numbered]
