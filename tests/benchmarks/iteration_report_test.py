"""The files of the analysis by hand, and a treebank by plain counting."""

import functools
import html
import re

import numpy as np
import pytest

from benchmarks import command, iteration_report
from benchmarks.iteration_report import CURVES, DEPTH, Analysis
from dataset_lib import builder, tokenizer
from tests.albert_act import small

VOCABULARY = [
  '[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *(f'w{n}' for n in range(30)),
  '##a', '##b',
]  # fmt: skip
CONTROL = '\u0085'  # nothing is left of it


@pytest.fixture(scope='module')
def words(tmp_path_factory):
  path = tmp_path_factory.mktemp('words') / 'vocab.txt'
  path.write_text('\n'.join(VOCABULARY))
  return tokenizer.load(path)


def found():
  lines = [
    {'all': [0.75, 0.875], 'cls': [0, 1]},
    {'all': [0.75, 0.75], 'cls': [0, np.nan]},
    {'all': [1, 0.5], 'cls': [1, 0]},
  ]
  return Analysis(
    {'all': (3, 3.0, 0.66667**0.5), 'cls': (2, 6.0, 0.0), DEPTH: (2, 5.5, 0.5)},
    {name: {kind: np.array(line, float) for kind, line in own.items()}
     for name, own in zip(CURVES, lines, strict=True)},
  )  # fmt: skip


def test_tables_by_hand(tmp_path, capsys):
  iterations, similarity = iteration_report.tables(found())
  command.write_tables(tmp_path, [iterations, similarity])
  assert (tmp_path / 'iterations.csv').read_text().splitlines() == [
    'tokens,count,mean,std', 'all,3,3.0,0.8165', 'cls,2,6.0,0.0',
    'executed depth of a row,2,5.5,0.5',
  ]  # fmt: skip
  assert (tmp_path / 'similarity.csv').read_text().splitlines() == [
    'iteration,all,all running,all share,cls,cls running,cls share',
    '1,0.75,0.75,1.0,0.0,0.0,1.0', '2,0.875,0.75,0.5,1.0,,0.0',
  ]  # fmt: skip
  assert similarity.columns == ['iteration', 'all', 'all running', 'all share']
  printed = capsys.readouterr().out
  assert 'cls running' not in printed
  # 3 of 2 and 5.5 of 2, as the numbers above are made up.
  assert '150%' in printed
  assert '275%' in printed


@pytest.mark.parametrize(
  ('names', 'texts'),
  [
    ('[CLS] un ##do ## # [SEP]', '[CLS] un +do ## # [SEP]'),
    ('[CLS] ▁un do . ##x [MASK] [ < [SEP]',
     '[CLS] un +do +. +##x [MASK] +[ +< [SEP]'),
    ('<unk> ▁▁a <pad>', '<unk> ▁a <pad>'),
    ('', ''),
  ],
)  # fmt: skip
def test_words_of_both_tokenizers(names, texts):
  """A plus says that a token continues the one before."""
  found = iteration_report.words(names.split())
  assert [('+' if glued else '') + text for text, glued in found] == (
    texts.split()
  )


NAMES = ('[CLS]', 'un', '##do', '$x$', '<b>', '映画\ud800', '[SEP]')


def test_the_page_has_the_real_rows_and_is_denser_for_more_steps():
  batch = {
    'tokens': np.array([[*range(7)], [0, 3, 6, *[0] * 4], [0] * 7]),
    'length': np.array([7, 3, 0]),
    'mask': np.array([1.0, 1.0, 0.0]),
  }
  spent = [[2, 1, 2, 1, 1, 2, 1], [1, 2, 1, *[0] * 4], [0] * 7]
  batches = [(batch, steps(*spent), None)]
  page = iteration_report.page(batches, lambda ids: [NAMES[n] for n in ids], 2)
  body = page.decode().split('<body')[1]
  scale, *rows = re.split('\nmean (.+)\n', body)
  assert rows[::2] == ['1.4, executed 2', '1.3, executed 2']
  assert re.findall(' title="(.*?)"', scale) == ['1 of 2', '2 of 2']
  # A browser shows a lone surrogate as a replacement character.
  texts = [html.unescape(re.sub('<[^>]*>', '', row)) for row in rows[1::2]]
  assert texts[0].split() == [
    '[CLS]', 'undo', '$x$', '<b>', '映画\ufffd', '[SEP]'
  ]  # fmt: skip
  assert texts[1].split() == ['[CLS]', '$x$', '[SEP]']
  most, least = re.findall('background:(#[0-9A-Fa-f]{8})', rows[1])[:2]
  assert most[:7] == least[:7]
  assert [int(one[7:], 16) for one in (least, most)] == [85, 170]


def steps(*values):
  return np.array(values, np.int32)


def values(rows):
  names = 'label', 'count', 'mean', 'high'
  return [tuple(row.get(name, '') for name in names) for row in rows]


def test_labels_are_ranked_and_marked():
  words = [('det', steps(2))] * 4 + [('nsubj', steps(3))] * 3
  words += [('root', steps(6, 6)), ('root', steps(3))]
  words += [('rare', steps(20)), ('root', steps())]
  labels, below = iteration_report.label_rows(words, at_least=2)
  # Every token counts, so that of root is (6 + 6 + 3) / 3 = 5.
  assert values(labels) == [
    ('det', 4, 2.0, ''), ('nsubj', 3, 3.0, ''),
    ('root', 2, 5.0, '*'),  # 5 > 3.33 + 1.25
  ]  # fmt: skip
  assert [(row['count'], row['mean']) for row in below] == [
    (3, 3.3333), (3, 1.2472), (1, None)
  ]  # fmt: skip


@pytest.mark.parametrize(
  ('words', 'means'),
  [([], [None] * 3), ([('a', steps(6)), ('b', steps(6, 6))], [6.0, 0.0, None])],
)
def test_equal_means_are_not_high_and_nothing_has_no_mean(words, means):
  labels, below = iteration_report.label_rows(words, 1)
  assert [row['mean'] for row in below] == means
  assert [row['high'] for row in labels] == [''] * len(words)


def test_a_treebank_by_hand(words, monkeypatch):
  # Two batches, and rows rounded up to different lengths.
  twos = functools.partial(builder.spread, batch_size=2)
  monkeypatch.setattr(builder, 'spread', twos)
  monkeypatch.setattr(iteration_report, '_STEP', 4)
  shapes = []

  def traced(model, variables, batches):
    """Yields the number of each token in its row, from 0."""
    for batch in batches:
      shapes.append(batch['tokens'].shape)
      length = batch['length'][:, None]
      place = np.arange(batch['tokens'].shape[1])
      yield batch, np.where(place < length, place, 0), None

  monkeypatch.setattr(iteration_report, 'traced', traced)
  given = [
    # [CLS] w1 ##a [SEP]
    [('w1a', 'nsubj:pass')],
    # [CLS] w3 w4 [SEP]; nothing is left of the first word.
    [(CONTROL, 'det'), ('w3', 'root'), ('w4', '_')],
    # [CLS] w4 w5 ##a w6 w7 w8 [SEP], and no room for the others
    [('w4', 'obj'), ('w5a', 'obj'), ('w6', 'det'), ('w7', 'det'),
     ('w8', 'root'), ('w9ab', 'obj'), ('w1', 'obj')],
  ]  # fmt: skip
  arguments = (*small.build(), words, given, 8)
  table = iteration_report.label_table(*arguments)
  means = [1.5, 3.5, 2.0, 4.5]
  assert values(table.rows) == [
    ('det', 2, 4.5, '*'), ('obj', 2, 2.0, ''), ('root', 2, 3.5, ''),
    ('nsubj', 1, 1.5, ''),
    ('mean of the labels', 4, np.mean(means), ''),
    ('standard deviation of the labels', 4, np.std(means).round(4), ''),
    ('words of rarer labels', 0, None, ''),
    ('words left out', 3, None, ''),
    ('executed depth of a row', 3, round((3 + 3 + 7) / 3, 4), ''),
  ]  # fmt: skip
  assert shapes == [(2, 4), (2, 8)]
  table = iteration_report.label_table(*arguments, at_least=2)
  rows = {row['label']: row['count'] for row in table.rows}
  assert rows['words of rarer labels'] == 1
  assert 'nsubj' not in rows
