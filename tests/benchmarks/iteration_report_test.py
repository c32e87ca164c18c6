"""The analysis of iterations: by hand, and against plain counting."""

import functools
import html
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from albert_act import token_kinds
from albert_act.model import AlbertPretraining
from benchmarks import command, iteration_report
from benchmarks.iteration_report import CURVES, DEPTH, Analysis
from dataset_lib import builder, tokenizer
from tests.albert_act import small
from tests.dataset_lib import corpora

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


def batch():
  """Four rows, the last of them padding, with words to predict."""
  tokens, types, length = map(np.array, small.batch((9, 6, 7, 1), 9))
  # [CLS] x x x [SEP] y y y [SEP]; [CLS] x x [SEP] y [SEP]; [CLS] ... [SEP]
  types[:3] = [[0] * 5 + [1] * 4, [0] * 4 + [1] * 2 + [0] * 3, [0] * 9]
  weights = [[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]]
  return {
    'tokens': tokens,
    'token_types': types,
    'length': length,
    'mask': np.array([1, 1, 1, 0], np.float32),
    'mlm_positions': np.array([[1, 6, 7], [2, 0, 0], [3, 4, 0], [0, 0, 0]]),
    'mlm_kind': np.array([[0, 1, 2], [2, 0, 0], [0, 0, 0], [0, 0, 0]]),
    'mlm_weights': np.array(weights, np.float32),
  }


def kinds_by_hand():
  """Kind of each token, '' for padding."""
  rows = [['unmasked'] * 9, ['unmasked'] * 6 + [''] * 3,
          ['unmasked'] * 7 + [''] * 2, [''] * 9]  # fmt: skip
  for row, ends in enumerate([(4, 8), (3, 5), (6,)]):
    rows[row][0] = 'cls'
    for place in ends:
      rows[row][place] = 'sep'
  rows[0][1], rows[0][6], rows[0][7] = 'mask', 'random', 'original'
  rows[1][2] = 'original'
  rows[2][3] = rows[2][4] = 'mask'
  return np.array(rows)


def test_kinds_of_tokens_and_their_means():
  want = kinds_by_hand()
  text = (want != '') & (want != 'cls') & (want != 'sep')
  rows = jax.tree.map(jnp.asarray, batch())
  plain = {k: v for k, v in rows.items() if not k.startswith('mlm')}
  values = jnp.arange(36).reshape(4, 9)
  for arrays, masked in ((rows, True), (plain, False)):
    found = token_kinds.masks(arrays)
    means = token_kinds.means('n', values, arrays)
    assert tuple(found) == token_kinds.KINDS
    for kind in token_kinds.KINDS:
      expected = want != '' if kind == 'all' else want == kind
      if not masked and kind not in ('all', 'cls', 'sep'):
        expected = text if kind == 'unmasked' else np.zeros_like(text)
      np.testing.assert_array_equal(found[kind], expected, err_msg=kind)
      mean = np.mean(values[expected]) if expected.any() else np.nan
      assert means[f'n_{kind}'].compute() == pytest.approx(mean, nan_ok=True)


def test_means_are_those_of_a_plain_loop():
  model, variables = small.build(AlbertPretraining)
  rows = batch()
  # Twice, in batches of different rows: moments add up.
  found = iteration_report.analyse(model, variables, [rows, rows])
  tokens, depths = [], []  # (kind, iterations, cosines) of each token
  for row, kinds in enumerate(kinds_by_hand()[:3]):
    length = rows['length'][row]
    _, spent, _, history = small.encode_by_loop(
      variables['params'], rows['tokens'][row, :length],
      rows['token_types'][row, :length], model,
    )  # fmt: skip
    depths.append(spent.max())
    for token in range(length):
      units = [x[token] / np.linalg.norm(x[token]) for x in history]
      cosines = [a @ b for a, b in itertools.pairwise(units)]
      tokens.append((kinds[token], spent[token], cosines))
  [(_, found_steps, _)] = iteration_report.traced(model, variables, [rows])
  np.testing.assert_array_equal(
    found_steps[kinds_by_hand() != ''], [spent for _, spent, _ in tokens]
  )
  kinds, steps, cosines = map(np.array, zip(*tokens, strict=True))
  depths = np.array(depths)
  want = {kind: steps[(kinds == kind) | (kind == 'all')]
          for kind in token_kinds.KINDS}  # fmt: skip
  want[iteration_report.DEPTH] = depths
  assert list(found.iterations) == list(want)
  for kind, values in want.items():
    count, *moments = found.iterations[kind]
    assert count == 2 * len(values)
    expected = [values.mean(), values.std()]
    np.testing.assert_allclose(moments, expected, atol=1e-6)
  similar, running, share = found.curves.values()
  still = steps[:, None] > np.arange(6)
  for kind in token_kinds.KINDS:
    own = (kinds == kind) | (kind == 'all')
    weight = still[own].mean(0)
    np.testing.assert_allclose(similar[kind], cosines[own].mean(0), atol=1e-5)
    np.testing.assert_allclose(share[kind], weight)
    mean = (cosines * still)[own].mean(0)
    weight[weight == 0] = np.nan
    np.testing.assert_allclose(running[kind], mean / weight, atol=1e-5)
  # The halted ones pull the mean of all tokens to 1.
  last = np.flatnonzero(share['all'])[-1]
  assert share['all'][last] < 1
  assert running['all'][last] < similar['all'][last] - 1e-4


def test_a_row_of_ponder_net_that_has_halted_counts_as_one():
  model, variables = small.build(rule=small.PONDER)
  ((rows, steps, cosines),) = iteration_report.traced(
    model, variables, [batch()]
  )
  still = np.arange(6)[:, None, None] < steps
  halted = ~still & (np.arange(9) < rows['length'][:, None])
  assert halted.any()
  assert (cosines[halted] == 1.0).all()
  assert cosines[still].mean() < 0.9


@pytest.mark.parametrize(
  ('rows', 'count', 'expected'),
  [
    (10, 5, [0, 2, 4, 6, 8]), (7, 3, [0, 2, 4]), (3, 8, [0, 1, 2]),
    (5, 5, [0, 1, 2, 3, 4]), (5, 0, []),
  ],
)  # fmt: skip
def test_rows_have_even_distances(rows, count, expected):
  config = dict(name='parity', length=4, test_examples=rows)
  source = builder.build_source(config, 'test')
  batches = list(builder.spread(source, count).batches())
  found = [row for one in batches for row in one['index'][one['mask'] > 0]]
  assert found == expected


def test_rows_of_all_lengths_each_batch_with_those_of_a_length(tmp_path):
  # Row n has 22 - n tokens besides [CLS] and [SEP].
  rows = [f'{" ".join(["w1"] * (22 - n))}\t{n % 2}' for n in range(22)]
  (tmp_path / 'dev.tsv').write_text('\n'.join(['sentence\tlabel', *rows]))
  source = builder.build_source(
    dict(name='glue', task='sst2', directory=str(tmp_path), max_length=32,
         tokenizer=str(corpora.tokenizer(tmp_path / 'words')),
         length_buckets=(8, 16)),
    'validation',
  )  # fmt: skip
  batches = list(builder.spread(source, 11, 4).batches())
  assert [batch['tokens'].shape for batch in batches] == [
    (4, 16), (4, 32), (4, 32)
  ]  # fmt: skip
  mask, lengths, index = (
    np.concatenate([batch[name] for batch in batches])
    for name in ('mask', 'length', 'index')
  )
  np.testing.assert_array_equal(mask, [1] * 11 + [0])
  np.testing.assert_array_equal(lengths[:11], np.arange(4, 26, 2))
  np.testing.assert_array_equal(np.sort(index[:11]), np.arange(0, 22, 2))


def test_rows_of_pretraining_are_those_of_evaluation(tmp_path):
  directory, _ = corpora.prepare(tmp_path, corpora.documents(20))
  config = corpora.pretraining_config(directory)
  data = builder.build(
    config, split='train', train=False, seed=3, batch_size=500, num_threads=0
  )
  (whole,) = data.batches()
  source = builder.build_source(config, 'train')
  (batch,) = builder.spread(source, 5, seed=3).batches()
  assert set(batch) == set(whole)
  for name, values in batch.items():
    np.testing.assert_array_equal(values, whole[name][batch['index']])
  assert len(batch['mask']) == 5
