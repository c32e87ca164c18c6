"""The picture and the page of surviving tokens, drawn from made arrays."""

import html.parser

import numpy as np
import pytest

from eval_lib import token_page, token_plots
from eval_lib.token_plots import GONE, KEPT, REMOVED, Sentence
from tests.eval_lib import overlaps

NAMES = (
  '[CLS]', 'an', 'un', '##for', '##get', '##table', '$', 'film', '&', '<b>',
  '[SEP]',
)  # fmt: skip
CLASSES = ('negative', 'positive')


def array(*values):
  return np.array(values)


def shares(*values):
  return np.array(values, np.float32)


def sentence(**changes):
  fields = dict(
    names=NAMES,
    pruned={2: array(0, 2, 4, 7, 8, 9), 4: array(0, 4, 7)},
    heads={4: shares(0.4, 0.6), 6: shares(0.1, 0.9)},
    class_names=CLASSES,
    truth='positive',
  )
  return Sentence(**(fields | changes))


@pytest.fixture
def drawn(tmp_path, made):
  """Draws sentences; gives the axes of the picture."""

  def draw(*sentences):
    token_plots.plot_tokens(tmp_path / 'tokens', sentences)
    return made[-1].axes[0]

  return draw


def test_a_token_is_kept_then_removed_then_gone():
  rows = token_plots.rows_of(sentence())
  # The head at layer 4 is asked before the pruning after layer 4.
  assert [row.label for row in rows] == [
    'tokens', 'after layer 2', 'head 4', 'after layer 4', 'head 6',
  ]  # fmt: skip
  first, second, third = (row.states for row in rows if row.head is None)
  assert set(first) == {KEPT}
  for place in range(len(NAMES)):
    two, four = place in (0, 2, 4, 7, 8, 9), place in (0, 4, 7)
    assert second[place] == (KEPT if two else REMOVED)
    assert third[place] == (KEPT if four else REMOVED if two else GONE)


def test_it_exits_at_the_last_head_reached():
  early = sentence(heads={4: shares(0.7, 0.3)}, pruned={2: array(0, 1)})
  assert early.exit_layer == 4
  assert early.answer == 'negative'
  assert early.is_wrong
  assert token_plots.headline(early) == (
    'negative, exit at layer 4 (right: positive)'
  )
  assert token_plots.headline(sentence()) == 'positive, exit at layer 6'
  assert not sentence(truth='').is_wrong


def test_a_regression_has_a_number_and_no_bars(drawn, tmp_path):
  one = sentence(
    heads={4: shares(3.25), 6: shares(3.5)}, class_names=(), truth='4.0'
  )
  assert token_plots.headline(one) == '3.50, exit at layer 6 (right: 4.0)'
  axes = drawn(one)
  assert not axes.patches
  assert {'3.25', '3.50'} <= {text.get_text() for text in axes.texts}
  page = token_page.write_html(tmp_path / 'page', [one]).read_text()
  assert '3.25' in page
  assert 'class="bar"' not in page


def test_the_picture_strikes_what_is_removed(drawn):
  axes = drawn(sentence())
  texts = [text.get_text() for text in axes.texts]
  # Three rows of tokens; pieces are glued, and '$' is no mathematics.
  for name in NAMES:
    assert texts.count(name.removeprefix('##')) == 3
  assert not any(text.get_parse_math() for text in axes.texts)
  removed = [states for _, states, _ in token_plots.rows_of(sentence())]
  struck = sum(state != KEPT for states in removed for state in states)
  assert len(axes.get_lines()) == struck == 5 + 8
  # A bar for each class of each head, as long as its probability.
  widths = np.array([bar.get_width() for bar in axes.patches])
  np.testing.assert_allclose(widths / widths.sum() * 2, [0.4, 0.6, 0.1, 0.9])


def test_no_two_texts_overlap_and_none_leaves_the_picture(drawn):
  long = [f'word{n}' if n % 3 else f'##piece{n}' for n in range(60)]
  many = sentence(
    names=long,
    pruned={2: np.arange(0, 60, 2)},
    heads={4: shares(0.5, 0.2, 0.2, 0.1)},
    class_names=('a' * 40, 'b', 'c', 'd'),
    truth='',
  )
  axes = drawn(sentence(), many)
  overlaps.assert_readable(axes, 150)


def test_writes_png_and_pdf_also_of_letters_that_no_font_has(tmp_path):
  odd = sentence(names=('[CLS]', '映', '画', '\U0001f600', *NAMES[4:]))
  path = token_plots.plot_tokens(tmp_path / 'tokens.csv', [odd])
  assert path == tmp_path / 'tokens.png'
  assert path.read_bytes().startswith(b'\x89PNG\r\n\x1a\n')
  assert path.with_suffix('.pdf').read_bytes().startswith(b'%PDF')


class Spans(html.parser.HTMLParser):
  """(class, text) of the innermost spans, and all tags."""

  def __init__(self):
    super().__init__()
    self.spans, self.tags, self._open = [], [], []

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    if tag == 'span':
      self._open.append(dict(attrs).get('class'))

  def handle_endtag(self, tag):
    if tag == 'span':
      self._open.pop()

  def handle_data(self, data):
    if self._open:
      self.spans.append((self._open[-1], data))


def test_the_page_says_the_same_and_escapes_everything(tmp_path):
  evil = '<script>alert("1")</script>&'
  one = sentence(names=(*NAMES[:-1], evil), class_names=(evil, 'positive'))
  path = token_page.write_html(tmp_path / 'page.png', [one], title=evil)
  assert path == tmp_path / 'page.html'
  text = path.read_text(encoding='utf-8')
  page = Spans()
  page.feed(text)
  assert 'script' not in page.tags
  assert 'b' not in page.tags
  names = [name.removeprefix('##') for name in one.names]
  for row in token_plots.rows_of(one):
    if row.states:
      wanted = list(zip(row.states, names, strict=True))
      assert any(
        [s for s in page.spans[i:] if s[0] in (KEPT, REMOVED, GONE)][
          : len(names)
        ]
        == wanted
        for i in range(len(page.spans))
      )
  assert 'width:6.30em' in text  # 0.9 of 7 em
  assert 'http' not in text
  assert 'un</span><span' in text  # '##for' continues 'un'


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      dict(pruned={2: array(0, 11)}),
      r'pruned\[2\]: expected places in \[0, 11',
    ),
    (dict(pruned={2: array(-1)}), r'pruned\[2\]'),
    (dict(heads={}), 'heads: expected at least'),
    (dict(heads={4: shares(1.0)}), r'heads\[4\]: expected 2 numbers, got 1'),
  ],
)
def test_arrays_that_do_not_fit_are_errors(changes, message):
  with pytest.raises(ValueError, match=message):
    sentence(**changes)


def test_nothing_to_draw_is_an_error(tmp_path):
  for write in (token_plots.plot_tokens, token_page.write_html):
    with pytest.raises(ValueError, match='at least one sentence'):
      write(tmp_path / 'x', [])
