"""The analysis of iterations, and its rows, against plain counting."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from albert_act import token_kinds
from albert_act.model import AlbertPretraining
from benchmarks import iteration_report
from dataset_lib import builder
from tests.albert_act import small
from tests.dataset_lib import corpora


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
