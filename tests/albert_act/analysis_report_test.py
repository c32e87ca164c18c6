"""The files of the analysis, from numbers made by hand."""

import csv
import sys

import numpy as np
import pytest

from albert_act import analysis_report, token_kinds
from albert_act.analysis import Analysis, Moments
from albert_act.analysis_report import Table
from dataset_lib import tokenizer
from eval_lib import text_pages


def moments(*values):
  found = Moments()
  found.add(np.array(values, np.float64))
  return found


def found():
  nothing = {kind: Moments() for kind in token_kinds.KINDS}
  return Analysis(
    iterations=nothing | {'all': moments(2, 4, 3), 'cls': moments(6, 6)},
    depth=moments(6, 5),
    similarity=nothing
    | {'all': moments((0.5, 0.75), (1, 1)), 'cls': moments((0, 1))},
    running=nothing
    | {'all': moments((0.5, 0.75), (1, np.nan)), 'cls': moments((0, np.nan))},
    max_iterations=2,
  )


LABELS = Table('labels', '', [{'label': 'det', 'count': 4}], '', [])
PAGE = [text_pages.depths_block(('[CLS]', 'a'), (2, 1), 2, 'one')]


def write(out, tables=(), page=()):
  all_tables = [*analysis_report.tables(found()), *tables]
  return analysis_report.write(out, found(), all_tables, page)


def read(path):
  with path.open(newline='') as file:
    return list(csv.reader(file))


def test_tables_by_hand(tmp_path):
  assert write(tmp_path / 'new') == ''
  assert read(tmp_path / 'new' / 'iterations.csv') == [
    ['tokens', 'count', 'mean', 'std'],
    ['all', '3', '3.0', '0.8165'],
    ['cls', '2', '6.0', '0.0'],
    ['executed depth of a row', '2', '5.5', '0.5'],
  ]
  assert read(tmp_path / 'new' / 'similarity.csv') == [
    ['iteration', 'all', 'all running', 'all share', 'cls', 'cls running',
     'cls share'],
    ['1', '0.75', '0.75', '1.0', '0.0', '0.0', '1.0'],
    ['2', '0.875', '0.75', '0.5', '1.0', '', '0.0'],
  ]  # fmt: skip


def test_the_printed_similarity_is_that_of_all_tokens():
  iterations, similarity = analysis_report.tables(found())
  columns = {'iteration', 'all', 'all running', 'all share'}
  assert set(similarity.shown[0]) == columns
  assert iterations.shown == iterations.rows
  # 3 of 2 and 5.5 of 2, as the numbers above are made up.
  assert '150%' in iterations.note
  assert '275%' in iterations.note


@pytest.mark.parametrize(
  ('arguments', 'names'),
  [
    ({}, set()),
    ({'tables': [LABELS]}, {'labels.csv'}),
    ({'page': PAGE}, {'sentences.html', 'sentences.png', 'sentences.pdf'}),
  ],
)
def test_files_are_there_for_what_there_is(arguments, names, tmp_path):
  write(tmp_path, **arguments)
  always = {'iterations.csv', 'similarity.csv', 'similarity.png',
            'similarity.pdf'}  # fmt: skip
  assert {path.name for path in tmp_path.iterdir()} == always | names


def test_without_matplotlib_the_tables_are_there(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  missing = write(tmp_path, page=PAGE)
  assert "pip install -e '.[plots]'" in missing
  assert {path.name for path in tmp_path.iterdir()} == {
    'iterations.csv', 'similarity.csv', 'sentences.html'
  }  # fmt: skip


def test_sentences_are_the_real_rows(tmp_path):
  path = tmp_path / 'vocab.txt'
  path.write_text('\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', 'a', '##b']))
  batch = {
    'tokens': np.array([[2, 4, 5, 3], [2, 4, 3, 0], [0, 0, 0, 0]]),
    'length': np.array([4, 3, 0]),
    'mask': np.array([1.0, 1.0, 0.0]),
  }
  steps = np.array([[6, 1, 2, 1], [5, 3, 1, 0], [0, 0, 0, 0]], np.int32)
  words = tokenizer.load(path)
  assert analysis_report.blocks([(batch, steps)], words, 6) == [
    text_pages.scale(6),
    text_pages.depths_block(
      ['[CLS]', 'a', '##b', '[SEP]'], [6, 1, 2, 1], 6, 'mean 2.5, executed 6'
    ),
    text_pages.depths_block(
      ['[CLS]', 'a', '[SEP]'], [5, 3, 1], 6, 'mean 3.0, executed 5'
    ),
  ]
  assert analysis_report.blocks([], words, 6) == []
