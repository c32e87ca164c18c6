"""Pages of tokens: pruning and heads, iterations, as HTML and as pictures."""

import html
import re
import sys

import numpy as np
import pytest
from matplotlib import colors

from eval_lib import text_pages
from eval_lib.text_pages import Block, Piece

NAMES = ('[CLS]', 'an', 'un', '##for', '##get', '##table', '$', 'film', '&',
         '<b>', '[SEP]')  # fmt: skip
EVIL = '<script>alert("1")</script>&'
MOST = 6


def sentence(**changes):
  fields = dict(
    names=NAMES, truth='positive', class_names=('negative', 'positive'),
    pruned={2: np.array([0, 2, 4, 7, 8, 9]), 4: np.array([0, 4, 7])},
    heads={4: np.array([0.4, 0.6]), 6: np.array([0.1, 0.9])},
  )  # fmt: skip
  return text_pages.pruning_block(**(fields | changes))


def words(names=('[CLS]', 'un', '##do', '$', '<b>', '[SEP]')):
  return text_pages.depths_block(names, (6, 1, 3, 2, 5, 4), MOST, 'mean 3.5')


def pieces_of(*blocks, title='here'):
  return [one for line in text_pages.layout(blocks, title) for one in line]


def text_of(*blocks):
  """The lines of a page after its title, as a terminal would show them."""
  lines = []
  for line in text_pages.layout(blocks, '')[2:]:
    text = ''
    for column, piece in line:
      text += ' ' * (column - len(text)) + piece.text
    lines.append(text.rstrip())
  return lines


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
  """A plus says that a token continues the one before."""
  found = text_pages.pieces(names)
  assert [('+' if x.is_glued else '') + x.text for x in found] == [*texts]


def test_lines_break_where_the_next_token_does_not_fit(monkeypatch):
  monkeypatch.setattr(text_pages, 'WIDTH', 8)
  names = ['abc', '##de', 'fg', 'hi', 'jklmnopqrst', '##u', 'v']
  block = Block('', [('name', text_pages.pieces(names)), ('', [])])
  rows = ('hi', 'jklmnopqrst', 'u v')
  indented = [' ' * 7 + row for row in rows]
  assert text_of(block) == ['name   abcde fg', *indented, '', '']


# The head at layer 4 is asked before the pruning after it.
PAGE = """\
positive, exit at layer 6
tokens          [CLS] an unforgettable $ film & <b> [SEP]
after layer 2   [CLS] an unforgettable $ film & <b> [SEP]
head 4          negative  40.0 % █████         positive  60.0 % ███████
after layer 4   [CLS] an unforgettable $ film & <b> [SEP]
head 6          negative  10.0 % █             positive  90.0 % ███████████

b, exit at layer 4
tokens          one
head 4          b  40.0 % █████         d  30.0 % ████          c  20.0 % ██

positive, exit at layer 6 (right: negative)
tokens          one
head 6          negative  10.0 % █             positive  90.0 % ███████████

3.50, exit at layer 4 (right: 4.0)
tokens          one
head 4          3.50
"""


def test_a_sentence_has_its_heads_and_prunings():
  one = dict(names=['one'], pruned={})
  heads = {4: np.array([0.1, 0.4, 0.2, 0.3])}
  blocks = [
    sentence(),
    sentence(**one, truth='', heads=heads, class_names='abcd'),
    sentence(**one, truth='negative', heads={6: np.array([0.1, 0.9])}),
    sentence(**one, truth='4.0', heads={4: np.array([3.5])}, class_names=()),
  ]
  assert text_of(*blocks) == PAGE.split('\n')
  assert [block.look for block in blocks] == ['head', 'head', 'wrong', 'head']


def test_a_token_is_kept_then_removed_then_gone():
  rows = [''.join(x.look[0] for x in row) for _, row in sentence().rows]
  assert rows == ['k' * 11, 'krkrkrrkkkr', 'nn', 'kgrgkggkrrg', 'hh']


@pytest.mark.parametrize(
  ('depth', 'most', 'colour'),
  # 255 (1 - x / 2) with x = 0.66, 0.34, 0.12: 170.85, 211.65, 239.7.
  [(0, 6, '#ffffff'), (3, 6, '#abd4f0'), (6, 6, '#57a8e0'), (9, 6, '#57a8e0'),
   (0, 0, '#ffffff')],
)  # fmt: skip
def test_colours_of_iterations_by_hand(depth, most, colour):
  assert text_pages.colour_of(depth, most) == colour


def drawn(tmp_path, made, *blocks):
  text_pages.plot_page(tmp_path / 'x', blocks, title='here')
  [axes] = made[-1].axes
  return axes


def test_the_picture_strikes_what_is_removed(tmp_path, made):
  axes = drawn(tmp_path, made, sentence())
  shown = [(text.get_position()[0], text.get_text()) for text in axes.texts]
  pieces = pieces_of(sentence())
  assert shown == [(x, piece.text.rstrip()) for x, piece in pieces]
  # '$' is not mathematics.
  assert not any(text.get_parse_math() for text in axes.texts)
  assert len(axes.get_lines()) == 5 + 8
  bold = {x.get_text() for x in axes.texts if x.get_weight() == 'bold'}
  assert {'here', 'positive, exit at layer 6'} <= bold
  assert 'film' not in bold


def test_tokens_have_the_colour_of_their_iterations(tmp_path, made):
  axes = drawn(tmp_path, made, words())
  tokens = axes.texts[-6:]
  for bar, text, n in zip(
    axes.patches, tokens, (6, 1, 3, 2, 5, 4), strict=True
  ):
    assert bar.get_x() == text.get_position()[0] - 0.25
    assert bar.get_width() == len(text.get_text()) + 0.5
    colour = colors.to_hex(bar.get_facecolor())
    assert colour == text_pages.colour_of(n, MOST)


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


def test_the_page_shows_the_same_and_escapes_everything(tmp_path):
  block = sentence(names=(*NAMES[:-1], EVIL), class_names=(EVIL, 'positive'))
  odd = [Piece('\ud800'), Piece('x', fill='#1', hint=EVIL)]
  blocks = block, text_pages.scale(2), Block('<i>', [('', odd)])
  text_pages.write_page(tmp_path / 'page.png', blocks, title=EVIL)
  text = (tmp_path / 'page.html').read_text(encoding='utf-8')
  tags = set(re.findall(r'<(\w+)', text))
  assert tags == {'html', 'meta', 'title', 'style', 'pre', 'span'}
  spans = re.findall('<span ([^>]*)>([^<]*)</span>', text)
  pieces = [piece for _, piece in pieces_of(*blocks, title=EVIL)]
  for (look, shown), piece in zip(spans, pieces, strict=True):
    # A browser shows a lone surrogate as a replacement character.
    assert html.unescape(shown) == piece.text.replace('\ud800', '\ufffd')
    style = f'background:{piece.fill}" title="{html.escape(piece.hint)}'
    filled = f'class="fill" style="{style}"'
    assert look == (filled if piece.fill else f'class="{piece.look}"')
  body = html.unescape(re.sub('<[^>]*>', '', text))
  assert PAGE.split('\n')[1].replace('[SEP]', EVIL) in body


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
