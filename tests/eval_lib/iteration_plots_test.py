"""Tokens coloured by iterations, and curves of similarity, from made arrays."""

import html.parser
import re
import sys

import numpy as np
import pytest
from matplotlib import colors

from eval_lib import iteration_plots
from eval_lib.iteration_plots import Depths
from tests.eval_lib import overlaps

MOST = 6
WORDS = Depths(
  ('[CLS]', 'un', '##do', '$', '<b>', '[SEP]'), (6, 1, 3, 2, 5, 4), 'mean 3.5'
)
PIECES = Depths(('[CLS]', '▁un', 'do', '.', '[SEP]'), (6, 2, 1, 1, 3), '& <i>')
CURVES = {
  'cosine': {
    'mask': np.array([0.2, 0.6, 1.0]),
    'cls': np.array([0.1, -0.3, 0.9]),
  },
  'share': {
    'mask': np.array([1.0, 0.5, 0.0]),
    'cls': np.array([1.0, np.nan, np.nan]),
  },
}


def test_colours_by_hand():
  assert iteration_plots.colour_of(0, 6) == '#ffffff'
  assert iteration_plots.colour_of(6, 6) == '#57a8e0'
  assert iteration_plots.colour_of(9, 6) == '#57a8e0'
  # 255 (1 - x / 2) with x = 0.66, 0.34, 0.12: 170.85, 211.65, 239.7.
  assert iteration_plots.colour_of(3, 6) == '#abd4f0'
  assert iteration_plots.colour_of(0, 0) == '#ffffff'
  different = {iteration_plots.colour_of(depth, 24) for depth in range(25)}
  assert len(different) == 25


@pytest.mark.parametrize('draw', ['curves', 'depths'])
def test_writes_png_and_pdf(draw, tmp_path):
  path = tmp_path / 'picture.csv'
  if draw == 'curves':
    found = iteration_plots.plot_curves(path, CURVES, 'here')
  else:
    found = iteration_plots.plot_depths(path, [WORDS, PIECES], MOST)
  assert found == tmp_path / 'picture.png'
  assert found.read_bytes().startswith(b'\x89PNG\r\n\x1a\n')
  assert found.with_suffix('.pdf').read_bytes().startswith(b'%PDF')


def test_every_kind_of_token_has_its_curve(tmp_path, made):
  iteration_plots.plot_curves(tmp_path / 'x', CURVES, 'here')
  panels = made[-1].axes
  for axes, (name, curves) in zip(panels, CURVES.items(), strict=True):
    assert axes.get_legend_handles_labels()[1] == ['mask', 'cls']
    assert axes.get_ylabel() == name
    for line, values in zip(axes.get_lines(), curves.values(), strict=True):
      np.testing.assert_array_equal(line.get_xdata(), [1, 2, 3])
      np.testing.assert_array_equal(line.get_ydata(), values)
  assert panels[0].get_title(loc='left') == 'here'
  assert panels[-1].get_xlabel() == 'iteration'
  ticks = panels[-1].get_xticks()
  np.testing.assert_array_equal(ticks, np.round(ticks))


def drawn(tmp_path, made, sentences, most=MOST):
  """The texts of a picture, each with the colour behind it or None."""
  iteration_plots.plot_depths(tmp_path / 'x', sentences, most)
  (axes,) = made[-1].axes
  behind = {}
  for bar in axes.patches:
    x, y = bar.get_x() + 0.25, bar.get_y() + bar.get_height() / 2
    behind[round(x, 3), round(y, 3)] = (
      colors.to_hex(bar.get_facecolor()), bar.get_width()
    )  # fmt: skip
  return axes, [
    (text.get_text(), behind.get(tuple(np.round(text.get_position(), 3))))
    for text in axes.texts
  ]


def test_tokens_stand_on_the_colour_of_their_iterations(tmp_path, made):
  axes, texts = drawn(tmp_path, made, [WORDS, PIECES])
  names = ['[CLS]', 'un', 'do', '$', '<b>', '[SEP]',
           '[CLS]', 'un', 'do', '.', '[SEP]']  # fmt: skip
  depths = [6, 1, 3, 2, 5, 4, 6, 2, 1, 1, 3]
  tokens = [
    (name, (iteration_plots.colour_of(depth, MOST), len(name) + 0.5))
    for name, depth in zip(names, depths, strict=True)
  ]
  scale = [
    (str(n), (iteration_plots.colour_of(n, MOST), 1.5)) for n in range(1, 7)
  ]
  assert texts == [
    ('Iterations of each token', None), *scale, ('iterations', None),
    ('mean 3.5', None), *tokens[:6], ('& <i>', None), *tokens[6:],
  ]  # fmt: skip
  # '$' is no mathematics, and only titles are bold.
  assert not any(text.get_parse_math() for text in axes.texts)
  bold = [text.get_text() for text in axes.texts if text.get_weight() == 'bold']
  assert bold == ['Iterations of each token', 'mean 3.5', '& <i>']


def test_no_two_texts_overlap_and_none_leaves_the_picture(tmp_path, made):
  names = [f'word{n}' if n % 3 else f'##piece{n}' for n in range(60)]
  long = Depths(names, [1 + n % MOST for n in range(60)], 'long')
  axes, _ = drawn(tmp_path, made, [WORDS, long, long], most=40)
  overlaps.assert_readable(axes, 150)


class Page(html.parser.HTMLParser):
  """(text, colour, hint) of the spans, the other texts, and all tags."""

  def __init__(self, text):
    super().__init__()
    self.spans, self.texts, self.tags, self._open = [], [], [], None
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    if tag == 'span':
      self._open = dict(attrs)

  def handle_endtag(self, tag):
    self._open = None if tag == 'span' else self._open

  def handle_data(self, data):
    if self._open is None:
      self.texts.append(data)
      return
    colour = re.search('#[0-9a-f]{6}', self._open['style'])[0]
    self.spans.append((data, colour, self._open['title']))


def test_the_page_says_the_same_and_escapes_everything(tmp_path):
  evil = '<script>alert("1")</script>&'
  odd = Depths(('[CLS]', evil, '\ud800'), (6, 2, 1), evil)
  path = iteration_plots.write_depths(
    tmp_path / 'page.png', [WORDS, PIECES, odd], MOST, title=evil
  )
  assert path == tmp_path / 'page.html'
  text = path.read_text(encoding='utf-8')
  page = Page(text)
  assert set(page.tags) == {
    'html', 'meta', 'title', 'style', 'h1', 'h2', 'p', 'span'
  }  # fmt: skip
  assert evil in page.texts
  assert '& <i>' in page.texts
  wanted = [*((str(n), n) for n in range(1, 7)), ('[CLS]', 6), ('un', 1),
            ('do', 3), ('$', 2), ('<b>', 5), ('[SEP]', 4), ('[CLS]', 6),
            ('un', 2), ('do', 1), ('.', 1), ('[SEP]', 3), ('[CLS]', 6),
            (evil, 2), ('\ud800', 1)]  # fmt: skip
  spans = [
    (name, iteration_plots.colour_of(depth, MOST), f'{depth} of 6 iterations')
    for name, depth in wanted
  ]
  assert page.spans[:-1] == spans[:-1]
  assert page.spans[-1][1:] == spans[-1][1:]  # no file can hold a surrogate
  assert text.count('un</span><span') == 2  # what continues a word
  assert '$</span> <span' in text
  assert 'http' not in text


def test_letters_that_no_font_has_are_drawn_as_boxes(tmp_path):
  odd = Depths(('[CLS]', '映画', '\U0001f600'), (1, 2, 3))
  assert iteration_plots.plot_depths(tmp_path / 'x', [odd], MOST).is_file()


@pytest.mark.parametrize(
  ('names', 'iterations'), [(('a', 'b'), (1,)), (('a',), (1, 2)), ((), ())]
)
def test_every_token_has_its_iterations(names, iterations):
  with pytest.raises(ValueError, match='iterations: expected one for each'):
    Depths(names, iterations)


def test_nothing_to_draw_is_an_error(tmp_path):
  for write in (iteration_plots.plot_depths, iteration_plots.write_depths):
    with pytest.raises(ValueError, match='sentences: expected at least one'):
      write(tmp_path / 'x', [], MOST)
  with pytest.raises(ValueError, match='curves: expected at least one'):
    iteration_plots.plot_curves(tmp_path / 'x', {'cosine': {}}, 'here')
  assert not any(tmp_path.iterdir())


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  with pytest.raises(ImportError, match=r"pip install -e '\.\[plots\]'"):
    iteration_plots.plot_depths(tmp_path / 'x', [WORDS], MOST)
  # The page needs none.
  iteration_plots.write_depths(tmp_path / 'x', [WORDS], MOST)
