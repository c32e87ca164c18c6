"""F1 over spans, by hand and against conlleval's rules in a plain loop."""

import itertools

import jax.numpy as jnp
import numpy as np

from eval_lib import spans

NAMES = ('B-LOC', 'B-PER', 'I-LOC', 'I-PER', 'O')


def score(predicted, true, names=NAMES, is_word=None):
  """F1 of rows of names of tags."""
  given = [
    jnp.array([[names.index(tag) for tag in row.split()] for row in rows])
    for rows in (predicted, true)
  ]
  is_word = np.ones(given[0].shape, bool) if is_word is None else is_word
  scheme = spans.scheme(names)
  return spans.f1(*given, jnp.asarray(is_word), scheme).compute()


def test_spans_do_not_cross_rows_and_skip_what_is_no_word():
  rows = ['O B-PER', 'I-PER O'], ['O B-PER', 'B-PER O']
  assert score(*rows) == 1.0
  is_word = np.array([[False, True, False, True, True]])
  rows = ['O B-PER O I-PER O'], ['B-LOC B-PER B-LOC I-PER O']
  assert score(*rows, is_word=is_word) == 1.0
  # Two other spans, which are not found.
  assert score(*rows, is_word=~is_word) == 0.0
  assert np.isnan(score(['O O'], ['O O']))


def test_only_tags_of_spans_have_a_scheme():
  assert spans.scheme(('ADJ', 'NOUN', 'O')) is None
  assert spans.scheme(('O',)) is None
  kind, begins, ends = spans.scheme(('B', 'I', 'O'))
  assert (*kind, *begins, *ends) == (0, 0, -1, 1, 0, 0, 0, 0, 0)


def loop(tags):
  """Spans (type, start, end) of a row, as conlleval finds them."""
  found, start, last = [], None, ('O', '')
  for place, tag in enumerate([*tags, 'O']):
    prefix, _, kind = tag.partition('-')
    ended = last[0] in 'ESLU' or prefix in 'BSUO' or kind != last[1]
    if start is not None and ended:
      found.append((last[1], start, place))
      start = None
    if prefix != 'O' and start is None:
      start = place
    last = prefix, kind
  return set(found)


def test_against_a_loop():
  rng = np.random.default_rng(0)
  names = (*map('-'.join, itertools.product('BIESLU', 'XY')), 'O')
  rows = rng.choice(names, (2, 300, 7))
  # Predictions that are often right.
  rows[1] = np.where(rng.random((300, 7)) < 0.8, rows[0], rows[1])
  pairs = [(loop(a), loop(b)) for a, b in zip(*rows, strict=True)]
  correct, total = (
    sum(map(len, (count(*pair) for pair in pairs)))
    for count in (set.intersection, lambda a, b: [*a, *b])
  )
  texts = [[' '.join(row) for row in one] for one in rows]
  np.testing.assert_allclose(score(*texts, names), 2 * correct / total)
  assert 0.1 < correct / total < 0.45
