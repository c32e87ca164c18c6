"""Iterations by dependency label against plain counting."""

import collections

import numpy as np
import pytest

from albert_act import treebank
from dataset_lib import tokenizer
from dataset_lib.conllu import Sentence, Word
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


def steps(*values):
  return np.array(values, np.int32)


def test_labels_are_ranked_and_marked():
  words = [('det', steps(2))] * 4 + [('nsubj', steps(3))] * 3
  words += [('root', steps(6, 6)), ('root', steps(3))]
  words += [('rare', steps(20)), ('root', steps())]
  labels, mean, std = treebank.by_label(words, at_least=2)
  # Every token counts, so that of root is (6 + 6 + 3) / 3 = 5.
  assert [(x.name, x.count, x.mean) for x in labels] == [
    ('det', 4, 2.0), ('nsubj', 3, 3.0), ('root', 2, 5.0)
  ]  # fmt: skip
  assert mean == pytest.approx(10 / 3)
  assert std == pytest.approx(np.sqrt((16 / 9 + 1 / 9 + 25 / 9) / 3))
  assert [x.is_high for x in labels] == [False, False, True]  # 5 > 3.33 + 1.25


def test_equal_means_are_not_high():
  words = [('a', steps(6)), ('b', steps(6, 6))]
  labels, mean, std = treebank.by_label(words)
  assert (mean, std) == (6.0, 0.0)
  assert not any(label.is_high for label in labels)


def test_nothing_has_no_mean():
  labels, mean, std = treebank.by_label([])
  assert labels == []
  assert np.isnan(mean)
  assert np.isnan(std)


def sentence(rng, count):
  words = []
  for _ in range(count):
    form = str(rng.choice(WORDS)) + str(rng.choice(['', 'a', 'ab']))
    label = f'{rng.choice(LABELS)}{rng.choice(["", ":sub"])}'
    words.append(Word(form, '_', 0, label))
  return Sentence(tuple(words), '', 1)


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


@pytest.mark.parametrize('halting', ['act', ''])
def test_a_treebank_by_plain_counting(words, monkeypatch, halting):
  # Two batches, and rows rounded up to different lengths.
  monkeypatch.setattr(treebank, 'BATCH', 4)
  monkeypatch.setattr(treebank, '_STEP', 8)
  model, variables = small.build(halting=halting)
  if halting:
    variables = sooner(variables)
  rng = np.random.default_rng(0)
  given = [sentence(rng, count) for count in (3, 12, 1, 7, 2, 5)]
  odd = Word(CONTROL, '_', 0, 'det')
  given.append(Sentence((odd, *given[0].words), '', 1))
  limit = 16
  found = treebank.analyse(model, variables, words, given, limit)
  spent = collections.defaultdict(list)
  counts, depths, left_out = collections.Counter(), [], 0
  for one in given:
    row, spans = [VOCABULARY.index('[CLS]')], []
    for word in one.words:
      ids = pieces(word.form)
      if len(row) + len(ids) > limit - 1:
        break
      spans.append((word.label.split(':')[0], len(row), len(row) + len(ids)))
      row += ids
    left_out += len(one.words) - len(spans)
    row = np.array([*row, VOCABULARY.index('[SEP]')])
    _, n, _, _ = small.encode_by_loop(
      variables['params'], row, np.zeros_like(row), model
    )
    depths.append(n.max())
    for label, start, stop in spans:
      spent[label] += n[start:stop].tolist()
      counts[label] += stop > start
  assert left_out > 0
  assert found.left_out == left_out
  assert {x.name: x.count for x in found.labels} == dict(counts)
  for label in found.labels:
    assert label.mean == pytest.approx(np.mean(spent[label.name]))
  means = [np.mean(values) for values in spent.values()]
  assert found.mean == pytest.approx(np.mean(means))
  assert found.std == pytest.approx(np.std(means))
  assert found.depth.count == len(given)
  assert found.depth.mean == pytest.approx(np.mean(depths))
  if halting:
    assert found.std > 0.1
  else:
    assert (found.mean, found.depth.mean) == (6.0, 6.0)
  assert found.rare == 0
  few = min(counts.values())
  found = treebank.analyse(model, variables, words, given, limit, few + 1)
  assert {x.name: x.count for x in found.labels} == {
    name: count for name, count in counts.items() if count > few
  }
  assert found.rare == sum(n for n in counts.values() if n == few) > 0
