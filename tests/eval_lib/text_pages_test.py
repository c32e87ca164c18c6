"""Pages of tokens: pruning and heads, iterations, as HTML and as pictures."""

import html.parser
import sys

import numpy as np
import pytest
from matplotlib import colors

from eval_lib import text_pages
from eval_lib.text_pages import Block, Piece

NAMES = (
  '[CLS]', 'an', 'un', '##for', '##get', '##table', '$', 'film', '&', '<b>',
  '[SEP]',
)  # fmt: skip
EVIL = '<script>alert("1")</script>&'
MOST = 6


def sentence(**changes):
  fields = dict(
    names=NAMES,
    pruned={2: np.array([0, 2, 4, 7, 8, 9]), 4: np.array([0, 4, 7])},
    heads={4: np.array([0.4, 0.6]), 6: np.array([0.1, 0.9])},
    class_names=('negative', 'positive'),
    truth='positive',
  )
  return text_pages.pruning_block(**(fields | changes))


def words(names=('[CLS]', 'un', '##do', '$', '<b>', '[SEP]')):
  return text_pages.depths_block(names, (6, 1, 3, 2, 5, 4), MOST, 'mean 3.5')


def row_of(texts):
  """Pieces; a plus says that one continues the piece before."""
  return [Piece(x.lstrip('+'), is_glued=x.startswith('+')) for x in texts]


def lines_of(*blocks, title='here'):
  return text_pages.layout(blocks, title)


@pytest.mark.parametrize(
  ('names', 'texts'),
  [
    (('[CLS]', 'un', '##do', '##', '#', '[SEP]'),
     ('[CLS]', 'un', '+do', '##', '#', '[SEP]')),
    (('[CLS]', '▁un', 'do', '.', '▁', '##x', '[MASK]', '[', '<', '[SEP]'),
     ('[CLS]', 'un', '+do', '+.', ' ', '+##x', '[MASK]', '+[', '+<', '[SEP]')),
    (('<unk>', '▁▁a', '<pad>', ''), ('<unk>', '▁a', '<pad>', '+')),
    ((), ()),
  ],
)  # fmt: skip
def test_pieces_of_both_tokenizers(names, texts):
  assert text_pages.pieces(names) == row_of(texts)


def test_lines_break_where_the_next_token_does_not_fit(monkeypatch):
  monkeypatch.setattr(text_pages, 'WIDTH', 8)
  row = row_of(['abc', '+de', 'fg', 'hi', 'jklmnopqrst', '+u', 'v'])
  lines = lines_of(Block('', [('name', row), ('', [])]), title='title')
  # abcde fg / hi / jklmnopqrst / u v, after a name of 4 letters and 3 spaces
  assert [[(x - 7, piece.text) for x, piece in line] for line in lines] == [
    [(-7, 'title')], [],
    [(-7, 'name'), (0, 'abc'), (3, 'de'), (6, 'fg')], [(0, 'hi')],
    [(0, 'jklmnopqrst')], [(0, 'u'), (2, 'v')], [(-7, '')], [],
  ]  # fmt: skip


def test_a_token_is_kept_then_removed_then_gone():
  looks = {
    name: ''.join(piece.look[0] for piece in row)
    for name, row in sentence().rows
    if 'head' not in name
  }
  assert looks == {
    'tokens': 'k' * 11,
    'after layer 2': 'krkrkrrkkkr',
    'after layer 4': 'kgrgkggkrrg',
  }
  # The head at layer 4 is asked before the pruning after layer 4.
  assert [name for name, _ in sentence().rows] == [
    'tokens', 'after layer 2', 'head 4', 'after layer 4', 'head 6',
  ]  # fmt: skip


@pytest.mark.parametrize(
  ('changes', 'title', 'look'),
  [
    ({}, 'positive, exit at layer 6', 'head'),
    ({'truth': ''}, 'positive, exit at layer 6', 'head'),
    ({'heads': {4: np.array([0.7, 0.3])}, 'pruned': {2: np.array([0, 1])}},
     'negative, exit at layer 4 (right: positive)', 'wrong'),
    ({'heads': {4: np.array([3.25]), 6: np.array([3.5])}, 'class_names': (),
      'truth': '4.0'}, '3.50, exit at layer 6 (right: 4.0)', 'head'),
  ],
)  # fmt: skip
def test_the_title_has_the_answer_of_the_last_head(changes, title, look):
  block = sentence(**changes)
  assert (block.title, block.look) == (title, look)
  if changes.get('class_names') == ():  # a regression has no bars
    assert dict(block.rows)['head 4'] == [Piece('3.25')]


def test_a_head_shows_its_classes_with_bars():
  rows = dict(sentence().rows)
  texts = [(piece.text.split(), piece.look) for piece in rows['head 6']]
  assert texts == [
    (['negative', '10.0', '%', '█'], 'head'),
    (['positive', '90.0', '%', '█' * 11], 'head'),
  ]
  assert {piece.look for piece in rows['head 4']} == {'name'}
  many = sentence(
    heads={4: np.array([0.1, 0.4, 0.2, 0.3])}, class_names=('a', 'b', 'c', 'd')
  )
  shown = [piece.text.split()[0] for piece in dict(many.rows)['head 4']]
  assert shown == ['b', 'd', 'c']


@pytest.mark.parametrize(
  ('depth', 'most', 'colour'),
  [
    (0, 6, '#ffffff'),
    # 255 (1 - x / 2) with x = 0.66, 0.34, 0.12: 170.85, 211.65, 239.7.
    (3, 6, '#abd4f0'),
    (6, 6, '#57a8e0'),
    (9, 6, '#57a8e0'),
    (0, 0, '#ffffff'),
  ],
)
def test_colours_of_iterations_by_hand(depth, most, colour):
  assert text_pages.colour_of(depth, most) == colour


def drawn(tmp_path, made, *blocks):
  text_pages.plot_page(tmp_path / 'x', blocks, title='here')
  [axes] = made[-1].axes
  return axes


def test_the_picture_strikes_what_is_removed(tmp_path, made):
  axes = drawn(tmp_path, made, sentence())
  placed = [one for line in lines_of(sentence()) for one in line]
  assert [(text.get_position()[0], text.get_text()) for text in axes.texts] == [
    (x, piece.text.rstrip()) for x, piece in placed
  ]
  # '$' is not mathematics.
  assert not any(text.get_parse_math() for text in axes.texts)
  assert len(axes.get_lines()) == 5 + 8
  bold = {x.get_text() for x in axes.texts if x.get_weight() == 'bold'}
  assert {'here', 'positive, exit at layer 6'} <= bold
  assert 'film' not in bold


def test_tokens_have_the_colour_of_their_iterations(tmp_path, made):
  axes = drawn(tmp_path, made, words())
  bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
  tokens = axes.texts[-6:]
  assert bars == [
    (text.get_position()[0] - 0.25, len(text.get_text()) + 0.5)
    for text in tokens
  ]
  assert [colors.to_hex(bar.get_facecolor()) for bar in axes.patches] == [
    text_pages.colour_of(n, MOST) for n in (6, 1, 3, 2, 5, 4)
  ]


def test_no_two_texts_overlap_and_none_leaves_the_picture(
  tmp_path, made, assert_readable
):
  names = [f'word{n}' if n % 3 else f'##piece{n}' for n in range(60)]
  many = sentence(
    names=names, pruned={2: np.arange(0, 60, 2)},
    heads={4: np.array([0.5, 0.2, 0.2, 0.1])},
    class_names=('a' * 40, 'b', 'c', 'd'), truth='',
  )  # fmt: skip
  long = text_pages.depths_block(names, range(1, 61), 60, 'long')
  axes = drawn(tmp_path, made, text_pages.scale(60), sentence(), many, long)
  assert_readable(axes.figure, axes.texts, 250)


class Page(html.parser.HTMLParser):
  """(attributes, text) of the spans, and the whole text."""

  def __init__(self, path):
    super().__init__()
    self.spans, self.text, self._open = [], '', None
    self.feed(path.read_text(encoding='utf-8'))

  def handle_starttag(self, tag, attrs):
    assert tag in {'html', 'meta', 'title', 'style', 'pre', 'span'}
    self._open = dict(attrs) if tag == 'span' else None

  def handle_endtag(self, tag):
    self._open = None

  def handle_data(self, data):
    self.text += data
    if self._open is not None:
      self.spans.append((self._open, data))


def test_the_page_shows_the_same_and_escapes_everything(tmp_path):
  block = sentence(names=(*NAMES[:-1], EVIL), class_names=(EVIL, 'positive'))
  odd = Block(
    '<i>', [('', [Piece('\ud800'), Piece('x', fill='#1', hint=EVIL)])]
  )
  blocks = block, text_pages.scale(2), odd
  text_pages.write_page(tmp_path / 'page.png', blocks, title=EVIL)
  found = Page(tmp_path / 'page.html')
  written = [
    piece
    for line in lines_of(*blocks, title=EVIL)
    for _, piece in line
    if piece.text
  ]
  for (attributes, text), piece in zip(found.spans, written, strict=True):
    # A browser shows a lone surrogate as a replacement character.
    assert text == piece.text.replace('\ud800', '\ufffd')
    expected = {'class': piece.look}
    if piece.fill:
      colour = f'background:{piece.fill}'
      expected = {'class': 'fill', 'style': colour, 'title': piece.hint}
    assert attributes == expected
  assert ('1', '1 of 2 iterations') in [(x.text, x.hint) for x in written]
  tokens = 'tokens          [CLS] an unforgettable $ film & <b> '
  assert f'\n{tokens}{EVIL}\n' in found.text


@pytest.mark.parametrize('write', [text_pages.plot_page, text_pages.write_page])
def test_nothing_to_show_is_an_error(tmp_path, write):
  with pytest.raises(ValueError, match='expected something to draw'):
    write(tmp_path / 'x', [], title='')
  assert not any(tmp_path.iterdir())


def test_only_the_picture_needs_matplotlib(tmp_path, monkeypatch):
  odd = words(('[CLS]', '映画', '\U0001f600', '', 'a', 'b'))  # no font has them
  text_pages.plot_page(tmp_path / 'x.csv', [odd], title='here')
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  with pytest.raises(ImportError, match=r"pip install -e '\.\[plots\]'"):
    text_pages.plot_page(tmp_path / 'y', [words()], title='')
  text_pages.write_page(tmp_path / 'y', [words()], title='')
  names = {path.name for path in tmp_path.iterdir()}
  assert names == {'x.png', 'x.pdf', 'y.html'}
