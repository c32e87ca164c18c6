"""The analysis of iterations against plain counting."""

import itertools

import jax.numpy as jnp
import numpy as np

from albert_act import analysis, token_kinds
from albert_act.model import AlbertPretraining
from tests.albert_act import small

KINDS = ('mask', 'random', 'original')


def batch():
  """Four rows, the last of them padding, with words to predict."""
  tokens, types, length = small.batch((9, 6, 7, 1), 9)
  types = np.asarray(types).copy()
  # [CLS] x x x [SEP] y y y [SEP]; [CLS] x x [SEP] y [SEP]; [CLS] ... [SEP]
  types[0] = [0] * 5 + [1] * 4
  types[1] = [0] * 4 + [1] * 2 + [0] * 3
  types[2] = 0
  return {
    'tokens': np.asarray(tokens),
    'token_types': types,
    'length': np.asarray(length),
    'mask': np.array([1, 1, 1, 0], np.float32),
    'mlm_positions': np.array([[1, 6, 7], [2, 0, 0], [3, 4, 0], [0, 0, 0]]),
    'mlm_kind': np.array([[0, 1, 2], [2, 0, 0], [0, 0, 0], [0, 0, 0]]),
    'mlm_weights': np.array(
      [[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]], np.float32
    ),
  }


def on_device(rows):
  return {name: jnp.asarray(values) for name, values in rows.items()}


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


def test_kinds_of_tokens():
  found = token_kinds.masks(on_device(batch()))
  want = kinds_by_hand()
  assert set(found) == set(token_kinds.KINDS)
  for kind in token_kinds.KINDS:
    expected = want != '' if kind == 'all' else want == kind
    np.testing.assert_array_equal(found[kind], expected, err_msg=kind)


def test_without_masked_words_all_of_the_text_is_unmasked():
  rows = {k: v for k, v in batch().items() if not k.startswith('mlm')}
  found = token_kinds.masks(on_device(rows))
  assert not any(np.asarray(found[kind]).any() for kind in KINDS)
  want = kinds_by_hand()
  text = (want != '') & (want != 'cls') & (want != 'sep')
  np.testing.assert_array_equal(found['unmasked'], text)


def test_means_are_those_of_a_plain_loop():
  model, variables = small.build(AlbertPretraining)
  rows = batch()
  # Twice, in batches of different rows: moments add up.
  found = analysis.analyse(model, variables, [rows, rows])
  want = kinds_by_hand()
  steps = {kind: [] for kind in token_kinds.KINDS}
  angles = {kind: [] for kind in token_kinds.KINDS}
  depths = []
  for row in range(3):
    length = rows['length'][row]
    _, spent, _, history = small.encode_by_loop(
      variables['params'], rows['tokens'][row, :length],
      rows['token_types'][row, :length], model,
    )  # fmt: skip
    depths.append(spent.max())
    for token in range(length):
      x = [state[token] for state in history]
      cosines = [
        a @ b / np.sqrt(a @ a * (b @ b)) for a, b in itertools.pairwise(x)
      ]
      for kind in ('all', want[row, token]):
        steps[kind].append(spent[token])
        angles[kind].append(cosines)
  for kind in token_kinds.KINDS:
    assert found.iterations[kind].count == 2 * len(steps[kind])
    np.testing.assert_allclose(
      found.iterations[kind].mean, np.mean(steps[kind]), atol=1e-6
    )
    np.testing.assert_allclose(
      found.iterations[kind].std, np.std(steps[kind]), atol=1e-6
    )
    np.testing.assert_allclose(
      found.similarity[kind].mean, np.mean(angles[kind], 0), atol=1e-5
    )
    for n, moments in enumerate(found.running[kind]):
      ran = np.array(steps[kind]) > n
      assert moments.count == 2 * ran.sum()
      if ran.any():
        want_mean = np.array(angles[kind])[ran, n].mean()
        np.testing.assert_allclose(moments.mean, want_mean, atol=1e-5)
  # Those that have halted are what pulls the mean of all to 1.
  last = max(n for n, x in enumerate(found.running['all']) if x.count)
  running, everybody = found.running['all'][last], found.similarity['all']
  assert running.count < everybody.count
  assert running.mean < everybody.mean[last] - 1e-4
  np.testing.assert_allclose(found.depth.mean, np.mean(depths), atol=1e-6)
  assert found.max_iterations == 6


def test_iterations_of_batches():
  model, variables = small.build(AlbertPretraining)
  rows = batch()
  (got, steps), (again, _) = analysis.token_iterations(
    model, variables, [rows, rows]
  )
  assert got is again is rows
  for row, length in enumerate(rows['length']):
    _, spent, _, _ = small.encode_by_loop(
      variables['params'], rows['tokens'][row, :length],
      rows['token_types'][row, :length], model,
    )  # fmt: skip
    np.testing.assert_array_equal(steps[row, :length], spent)
    assert not steps[row, length:].any()


def test_nothing_has_no_mean():
  assert np.isnan(analysis.Moments().mean)
  assert np.isnan(analysis.Moments().std)


def test_cosine_by_hand():
  x = np.array([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0]], np.float32)
  y = np.array([[0.0, 2.0], [6.0, 8.0], [0.0, -1.0]], np.float32)
  got = analysis.cosine(jnp.asarray(x), jnp.asarray(y))
  np.testing.assert_allclose(got, [0.0, 1.0, -1.0], atol=1e-6)
