"""The files of the analysis, from numbers made by hand."""

import csv
import sys

import numpy as np
import pytest

from albert_act import analysis_files, token_kinds
from albert_act.analysis import Findings, Moments
from albert_act.treebank import Label, LabelFindings
from dataset_lib import tokenizer
from eval_lib.iteration_plots import Depths


def moments(*values):
  found = Moments()
  found.add(np.array(values, np.float64))
  return found


def findings():
  nothing = {kind: Moments() for kind in token_kinds.KINDS}
  return Findings(
    iterations=nothing | {'all': moments(2, 4, 3), 'cls': moments(6, 6)},
    depth=moments(6, 5),
    similarity=nothing
    | {'all': moments((0.5, 0.75), (1, 1)), 'cls': moments((0, 1))},
    running={kind: [Moments(), Moments()] for kind in token_kinds.KINDS}
    | {'all': [moments(0.5, 1), moments(0.75)], 'cls': [moments(0), Moments()]},
    max_iterations=2,
  )


def labels():
  rows = [Label('det', 4, 2.25, False), Label('root', 2, 5.0, True)]
  return LabelFindings(rows, 3.625, 1.375, moments(6, 4, 5), 1, 3)


def read(path):
  with path.open(newline='') as file:
    return list(csv.reader(file))


def test_tables_by_hand(tmp_path):
  missing = analysis_files.write(tmp_path / 'new', findings(), labels())
  assert missing == ''
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
  assert read(tmp_path / 'new' / 'labels.csv') == [
    ['label', 'count', 'mean', 'high'],
    ['det', '4', '2.25', ''],
    ['root', '2', '5.0', '*'],
    ['mean of the labels', '2', '3.625', ''],
    ['standard deviation of the labels', '2', '1.375', ''],
    ['words of rarer labels', '3', '', ''],
    ['words left out', '1', '', ''],
    ['executed depth of a row', '3', '5.0', ''],
  ]


def test_a_part_of_a_table():
  rows = analysis_files.similarity_rows(findings(), 'all')
  assert set(rows[0]) == {'iteration', 'all', 'all running', 'all share'}
  first, *below = analysis_files.label_rows(labels(), 1)
  assert (first['label'], first['high']) == ('det', '')
  assert below == analysis_files.label_rows(labels())[2:]


SHOWN = (Depths(('[CLS]', 'a'), (2, 1)),)


@pytest.mark.parametrize(
  ('arguments', 'names'),
  [
    ((), set()),
    ((labels(),), {'labels.csv'}),
    ((None, SHOWN), {'sentences.html', 'sentences.png', 'sentences.pdf'}),
  ],
)
def test_files_are_there_for_what_there_is(arguments, names, tmp_path):
  analysis_files.write(tmp_path, findings(), *arguments)
  always = {'iterations.csv', 'similarity.csv', 'similarity.png',
            'similarity.pdf'}  # fmt: skip
  assert {path.name for path in tmp_path.iterdir()} == always | names


def test_without_matplotlib_the_tables_are_there(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  missing = analysis_files.write(tmp_path, findings(), None, SHOWN)
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
  found = analysis_files.sentences([(batch, steps)], tokenizer.load(path))
  assert found == [
    Depths(['[CLS]', 'a', '##b', '[SEP]'], [6, 1, 2, 1],
           'mean 2.5, executed 6'),
    Depths(['[CLS]', 'a', '[SEP]'], [5, 3, 1], 'mean 3.0, executed 5'),
  ]  # fmt: skip
