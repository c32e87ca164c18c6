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


def shares(*values):
  return np.array(values, np.float32)


def sentence(**changes):
  fields = dict(
    names=NAMES,
    pruned={2: np.array([0, 2, 4, 7, 8, 9]), 4: np.array([0, 4, 7])},
    heads={4: shares(0.4, 0.6), 6: shares(0.1, 0.9)},
    class_names=('negative', 'positive'),
    truth='positive',
  )
  return text_pages.pruning_block(**(fields | changes))


def words():
  return text_pages.depths_block(
    ('[CLS]', 'un', '##do', '$', '<b>', '[SEP]'), (6, 1, 3, 2, 5, 4), MOST,
    'mean 3.5',
  )  # fmt: skip


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
  texts = ['abc', '+de', 'fg', 'hi', 'jklmnopqrst', '+u', 'v']
  row = [Piece(x.lstrip('+'), is_glued=x.startswith('+')) for x in texts]
  lines = text_pages.layout([Block('', [('name', row), ('', [])])], 'title')
  # abcde fg / hi / jklmnopqrst / u v, after a name of 4 letters and 3 spaces
  assert [[(x - 7, piece.text) for x, piece in line] for line in lines] == [
    [(-7, 'title')], [],
    [(-7, 'name'), (0, 'abc'), (3, 'de'), (6, 'fg')], [(0, 'hi')],
    [(0, 'jklmnopqrst')], [(0, 'u'), (2, 'v')], [(-7, '')], [],
  ]  # fmt: skip


def test_a_token_is_kept_then_removed_then_gone():
  rows = sentence().rows
  # The head at layer 4 is asked before the pruning after layer 4.
  assert [name for name, _ in rows] == [
    'tokens', 'after layer 2', 'head 4', 'after layer 4', 'head 6',
  ]  # fmt: skip
  looks = {name: [piece.look for piece in row] for name, row in rows}
  assert set(looks['tokens']) == {'kept'}
  for place in range(len(NAMES)):
    two, four = place in (0, 2, 4, 7, 8, 9), place in (0, 4, 7)
    assert looks['after layer 2'][place] == ('kept' if two else 'removed')
    expected = 'kept' if four else 'removed' if two else 'gone'
    assert looks['after layer 4'][place] == expected


def test_it_exits_at_the_last_head_reached():
  early = sentence(heads={4: shares(0.7, 0.3)}, pruned={2: np.array([0, 1])})
  title, _, look = early
  assert title == 'negative, exit at layer 4 (right: positive)'
  assert look == 'wrong'
  title, _, look = sentence()
  assert (title, look) == ('positive, exit at layer 6', 'head')
  assert sentence(truth='').look == 'head'


def test_a_head_shows_its_classes_with_bars():
  rows = dict(sentence().rows)
  texts = [(piece.text.split(), piece.look) for piece in rows['head 6']]
  assert texts == [
    (['negative', '10.0', '%', '█'], 'head'),
    (['positive', '90.0', '%', '█' * 11], 'head'),
  ]
  assert {piece.look for piece in rows['head 4']} == {'name'}
  many = sentence(
    heads={4: shares(0.1, 0.4, 0.2, 0.3)}, class_names=('a', 'b', 'c', 'd')
  )
  shown = [piece.text.split()[0] for piece in dict(many.rows)['head 4']]
  assert shown == ['b', 'd', 'c']


def test_a_regression_has_a_number_and_no_bars():
  block = sentence(
    heads={4: shares(3.25), 6: shares(3.5)}, class_names=(), truth='4.0'
  )
  assert block.title == '3.50, exit at layer 6 (right: 4.0)'
  assert dict(block.rows)['head 4'] == [Piece('3.25')]


def test_colours_of_iterations_by_hand():
  assert text_pages.colour_of(0, 6) == '#ffffff'
  assert text_pages.colour_of(6, 6) == '#57a8e0'
  assert text_pages.colour_of(9, 6) == '#57a8e0'
  # 255 (1 - x / 2) with x = 0.66, 0.34, 0.12: 170.85, 211.65, 239.7.
  assert text_pages.colour_of(3, 6) == '#abd4f0'
  assert text_pages.colour_of(0, 0) == '#ffffff'
  different = {text_pages.colour_of(depth, 24) for depth in range(25)}
  assert len(different) == 25


def drawn(tmp_path, made, *blocks):
  text_pages.plot_page(tmp_path / 'x', blocks, title='here')
  [axes] = made[-1].axes
  return axes


def test_the_picture_strikes_what_is_removed(tmp_path, made):
  axes = drawn(tmp_path, made, sentence())
  texts = [text.get_text() for text in axes.texts]
  # Three rows of tokens; '$' is not mathematics.
  for name in NAMES:
    assert texts.count(name.removeprefix('##')) == 3
  assert not any(text.get_parse_math() for text in axes.texts)
  assert len(axes.get_lines()) == 5 + 8
  bold = {x.get_text() for x in axes.texts if x.get_weight() == 'bold'}
  assert {'here', 'positive, exit at layer 6'} <= bold
  assert 'film' not in bold


def test_tokens_have_the_colour_of_their_iterations(tmp_path, made):
  axes = drawn(tmp_path, made, text_pages.scale(MOST), words())
  behind = {}
  for bar in axes.patches:
    x, y = bar.get_x() + 0.25, bar.get_y() + bar.get_height() / 2
    colour = colors.to_hex(bar.get_facecolor()), bar.get_width()
    behind[round(x, 3), round(y, 3)] = colour
  found = [
    (text.get_text(), behind.get(tuple(np.round(text.get_position(), 3))))
    for text in axes.texts
    if text.get_text()
  ]

  def on_colour(name, depth):
    return name, (text_pages.colour_of(depth, MOST), len(name) + 0.5)

  names = ['[CLS]', 'un', 'do', '$', '<b>', '[SEP]']
  assert found == [
    ('here', None),
    *(on_colour(str(n), n) for n in range(1, MOST + 1)), ('iterations', None),
    ('mean 3.5', None), *map(on_colour, names, (6, 1, 3, 2, 5, 4)),
  ]  # fmt: skip


def test_no_two_texts_overlap_and_none_leaves_the_picture(
  tmp_path, made, assert_readable
):
  names = [f'word{n}' if n % 3 else f'##piece{n}' for n in range(60)]
  many = sentence(
    names=names,
    pruned={2: np.arange(0, 60, 2)},
    heads={4: shares(0.5, 0.2, 0.2, 0.1)},
    class_names=('a' * 40, 'b', 'c', 'd'),
    truth='',
  )
  long = text_pages.depths_block(names, range(1, 61), 60, 'long')
  axes = drawn(tmp_path, made, text_pages.scale(60), sentence(), many, long)
  assert_readable(axes.figure, axes.texts, 250)


def test_writes_png_and_pdf_also_of_letters_that_no_font_has(tmp_path):
  odd = text_pages.depths_block(
    ('[CLS]', '映画', '\U0001f600'), (1, 2, 3), MOST, ''
  )
  text_pages.plot_page(tmp_path / 'x.csv', [odd], title='here')
  path = tmp_path / 'x.png'
  assert path.read_bytes().startswith(b'\x89PNG\r\n\x1a\n')
  assert path.with_suffix('.pdf').read_bytes().startswith(b'%PDF')


class Page(html.parser.HTMLParser):
  """(attributes, text) of the spans, all tags, and the whole text."""

  def __init__(self, text):
    super().__init__()
    self.spans, self.tags, self.text, self._open = [], [], '', None
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self._open = dict(attrs) if tag == 'span' else None

  def handle_endtag(self, tag):
    self._open = None

  def handle_data(self, data):
    self.text += data
    if self._open is not None:
      self.spans.append((self._open, data))


def page(path, *blocks, title='here'):
  text_pages.write_page(path / 'page.png', blocks, title=title)
  text = (path / 'page.html').read_text(encoding='utf-8')
  return text, Page(text)


def test_the_page_shows_the_same_and_escapes_everything(tmp_path):
  one = sentence(names=(*NAMES[:-1], EVIL), class_names=(EVIL, 'positive'))
  text, found = page(tmp_path, one, title=EVIL)
  assert set(found.tags) == {'html', 'meta', 'title', 'style', 'pre', 'span'}
  spans = [(x.get('class'), data) for x, data in found.spans]
  for name, row in one.rows:
    start = spans.index(('name', name)) + 1
    wanted = [(piece.look, piece.text) for piece in row]
    assert spans[start : start + len(row)] == wanted
  assert 'http' not in text
  tokens = 'tokens          [CLS] an unforgettable $ film & <b> '
  assert f'\n{tokens}{EVIL}\n' in found.text


def test_the_page_has_the_numbers_behind_the_colours(tmp_path):
  odd = Block('<i>', [('', [Piece('\ud800'), Piece(EVIL, hint=EVIL)])])
  text, found = page(tmp_path, text_pages.scale(2), words(), odd)
  filled = [
    (data, x['style'], x['title']) for x, data in found.spans if 'style' in x
  ]
  assert filled[:3] == [
    (name, f'background:{text_pages.colour_of(n, most)}',
     f'{n} of {most} iterations')
    for name, n, most in (('1', 1, 2), ('2', 2, 2), ('[CLS]', 6, MOST))
  ]  # fmt: skip
  assert len(filled) == 2 + 6
  assert '&lt;i&gt;' in text
  assert 'script' not in found.tags


def test_nothing_to_show_is_an_error(tmp_path):
  for write in (text_pages.plot_page, text_pages.write_page):
    with pytest.raises(ValueError, match='expected something to draw'):
      write(tmp_path / 'x', [], title='')
  assert not any(tmp_path.iterdir())


def test_only_the_picture_needs_matplotlib(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  with pytest.raises(ImportError, match=r"pip install -e '\.\[plots\]'"):
    text_pages.plot_page(tmp_path / 'x', [words()], title='')
  text_pages.write_page(tmp_path / 'x', [words()], title='')
