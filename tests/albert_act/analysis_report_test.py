"""The files of the analysis by hand, and a treebank by plain counting."""

import collections
import sys

import numpy as np
import pytest

from albert_act import analysis, analysis_report
from albert_act.analysis import Analysis, Moments
from dataset_lib import tokenizer
from dataset_lib.conllu import Word
from eval_lib import text_pages
from tests.albert_act import small

SPECIAL = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
WORDS = [f'w{number}' for number in range(30)]
VOCABULARY = [*SPECIAL, *WORDS, '##a', '##b']
LABELS = ('det', 'nsubj', 'root', 'obl')
CONTROL = '\u0085'  # nothing is left of it


@pytest.fixture(scope='module')
def words(tmp_path_factory):
  path = tmp_path_factory.mktemp('words') / 'vocab.txt'
  path.write_text('\n'.join(VOCABULARY))
  return tokenizer.load(path)


def moments(*values):
  found = Moments()
  found.add(np.array(values, np.float64))
  return found


def found():
  nothing = {kind: Moments() for kind in analysis.KINDS}
  return Analysis(
    iterations=nothing | {'all': moments(2, 4, 3), 'cls': moments(6, 6)},
    depth=moments(6, 5),
    similarity=nothing
    | {'all': moments((0.5, 0.75), (1, 1)), 'cls': moments((0, 1))},
    running=nothing
    | {'all': moments((0.5, 0.75), (1, np.nan)), 'cls': moments((0, np.nan))},
    max_iterations=2,
  )


def write(out, **arguments):
  tables = analysis_report.tables(found())
  missing = analysis_report.write(out, found(), tables, **arguments)
  return missing, {path.name for path in out.iterdir()}


TABLES = {'iterations.csv', 'similarity.csv'}
PICTURES = {'similarity.png', 'similarity.pdf'}
PAGE = [text_pages.depths_block(('[CLS]', 'a'), (2, 1), 2, 'one')]


def test_tables_by_hand(tmp_path):
  assert write(tmp_path / 'new') == ('', TABLES | PICTURES)
  assert (tmp_path / 'new' / 'iterations.csv').read_text().split('\n') == [
    'tokens,count,mean,std',
    'all,3,3.0,0.8165',
    'cls,2,6.0,0.0',
    'executed depth of a row,2,5.5,0.5',
    '',
  ]
  assert (tmp_path / 'new' / 'similarity.csv').read_text().split('\n') == [
    'iteration,all,all running,all share,cls,cls running,cls share',
    '1,0.75,0.75,1.0,0.0,0.0,1.0',
    '2,0.875,0.75,0.5,1.0,,0.0',
    '',
  ]
  iterations, similarity = analysis_report.tables(found())
  columns = {'iteration', 'all', 'all running', 'all share'}
  assert set(similarity.shown[0]) == columns
  # 3 of 2 and 5.5 of 2, as the numbers above are made up.
  assert '150%' in iterations.note
  assert '275%' in iterations.note


def test_without_matplotlib_the_tables_are_there(tmp_path, monkeypatch):
  page = {f'sentences.{kind}' for kind in ('html', 'png', 'pdf')}
  _, names = write(tmp_path / 'with', page=PAGE)
  assert names == TABLES | PICTURES | page
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  missing, names = write(tmp_path / 'without', page=PAGE)
  assert "pip install -e '.[plots]'" in missing
  assert names == TABLES | {'sentences.html'}


def test_sentences_are_the_real_rows(words):
  batch = {
    'tokens': np.array([[2, 5, 35, 3], [2, 5, 3, 0], [0, 0, 0, 0]]),
    'length': np.array([4, 3, 0]),
    'mask': np.array([1.0, 1.0, 0.0]),
  }
  steps = np.array([[6, 1, 2, 1], [5, 3, 1, 0], [0, 0, 0, 0]], np.int32)
  assert analysis_report.blocks([(batch, steps)], words, 6) == [
    text_pages.scale(6),
    text_pages.depths_block(
      ['[CLS]', 'w0', '##a', '[SEP]'], [6, 1, 2, 1], 6, 'mean 2.5, executed 6'
    ),
    text_pages.depths_block(
      ['[CLS]', 'w0', '[SEP]'], [5, 3, 1], 6, 'mean 3.0, executed 5'
    ),
  ]
  assert analysis_report.blocks([], words, 6) == []


def steps(*values):
  return np.array(values, np.int32)


def test_labels_are_ranked_and_marked():
  words = [('det', steps(2))] * 4 + [('nsubj', steps(3))] * 3
  words += [('root', steps(6, 6)), ('root', steps(3))]
  words += [('rare', steps(20)), ('root', steps())]
  labels, below = analysis_report.label_rows(words, at_least=2)
  # Every token counts, so that of root is (6 + 6 + 3) / 3 = 5.
  assert [tuple(row.values()) for row in labels] == [
    ('det', 4, 2.0, ''),
    ('nsubj', 3, 3.0, ''),
    ('root', 2, 5.0, '*'),  # 5 > 3.33 + 1.25
  ]
  mean, std = 10 / 3, np.sqrt((16 / 9 + 1 / 9 + 25 / 9) / 3)
  assert [tuple(row.values()) for row in below] == [
    ('mean of the labels', 3, round(mean, 4), ''),
    ('standard deviation of the labels', 3, round(std, 4), ''),
    ('words of rarer labels', 1, None, ''),
  ]


@pytest.mark.parametrize(
  ('words', 'means'),
  [([], [None] * 3), ([('a', steps(6)), ('b', steps(6, 6))], [6.0, 0.0, None])],
)
def test_equal_means_are_not_high_and_nothing_has_no_mean(words, means):
  labels, below = analysis_report.label_rows(words, 1)
  assert [row['mean'] for row in below] == means
  assert [row['high'] for row in labels] == [''] * len(words)


def sentence(rng, count):
  words = []
  for _ in range(count):
    form = str(rng.choice(WORDS)) + str(rng.choice(['', 'a', 'ab']))
    label = f'{rng.choice(LABELS)}{rng.choice(["", ":sub"])}'
    words.append(Word(form, 0, label))
  return tuple(words)


def pieces(form):
  """Ids of a word by hand: of those above, or none of what is left out."""
  if form == CONTROL:
    return []
  stem = form.rstrip('ab')
  tails = [f'##{letter}' for letter in form[len(stem) :]]
  return [VOCABULARY.index(name) for name in (stem, *tails)]


def sooner(variables):
  """Tokens halt after one to six iterations then."""
  params = dict(variables['params'])
  bias = params['score']['bias'] + 1.5
  params['score'] = params['score'] | {'bias': bias}
  return {'params': params}


def by_label(*arguments):
  """The rows of the table by their label."""
  table = analysis_report.label_table(*arguments)
  assert table.rows == table.shown
  return {row['label']: row for row in table.rows}


@pytest.mark.parametrize('halting', ['act', ''])
def test_a_treebank_by_plain_counting(words, monkeypatch, halting):
  # Two batches, and rows rounded up to different lengths.
  monkeypatch.setattr(analysis, 'BATCH', 4)
  monkeypatch.setattr(analysis_report, '_STEP', 8)
  model, variables = small.build(halting=halting)
  if halting:
    variables = sooner(variables)
  rng = np.random.default_rng(0)
  given = [sentence(rng, count) for count in (3, 12, 1, 7, 2, 5)]
  odd = Word(CONTROL, 0, 'det')
  given.append((odd, *given[0]))
  limit = 16
  found = by_label(model, variables, words, given, limit)
  spent = collections.defaultdict(list)
  counts, depths, left_out = collections.Counter(), [], 0
  for one in given:
    row, spans = [VOCABULARY.index('[CLS]')], []
    for word in one:
      ids = pieces(word.form)
      if len(row) + len(ids) > limit - 1:
        break
      spans.append((word.label.split(':')[0], len(row), len(row) + len(ids)))
      row += ids
    left_out += len(one) - len(spans)
    row = np.array([*row, VOCABULARY.index('[SEP]')])
    _, n, _, _ = small.encode_by_loop(
      variables['params'], row, np.zeros_like(row), model
    )
    depths.append(n.max())
    for label, start, stop in spans:
      spent[label] += n[start:stop].tolist()
      counts[label] += stop > start
  assert left_out > 0
  assert found.pop('words left out')['count'] == left_out
  assert found.pop('words of rarer labels')['count'] == 0
  mean, std, depth = (found.pop(name) for name in (
    'mean of the labels', 'standard deviation of the labels',
    'executed depth of a row',
  ))  # fmt: skip
  assert {name: row['count'] for name, row in found.items()} == dict(counts)
  for name, row in found.items():
    assert row['mean'] == pytest.approx(np.mean(spent[name]), abs=1e-4)
  means = [np.mean(values) for values in spent.values()]
  assert mean['mean'] == pytest.approx(np.mean(means), abs=1e-4)
  assert std['mean'] == pytest.approx(np.std(means), abs=1e-4)
  assert depth['count'] == len(given)
  assert depth['mean'] == pytest.approx(np.mean(depths), abs=1e-4)
  if halting:
    assert std['mean'] > 0.1
  else:
    assert (mean['mean'], depth['mean']) == (6.0, 6.0)
  few = min(counts.values())
  found = by_label(model, variables, words, given, limit, few + 1)
  rare = sum(n for n in counts.values() if n == few)
  assert found['words of rarer labels']['count'] == rare > 0
  often = {name for name, count in counts.items() if count > few}
  assert set(found) & set(counts) == often
