"""Tapes by difficulty: numbers by hand and by a loop, files, the picture."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import rankdata

from adatape import difficulty
from core.errors import ConfigError
from dataset_lib import builder
from eval_lib import evaluator
from tests.adatape import serving_test as tapes
from tests.contexts import eval_context, rows_on

DATA = dict(name='parity', length=8, letters=10, test_examples=150)
STEPS = 4


def outputs(variables, batch):
  """A tape that is longer for more 1s and -1s, and a label by symbol 0."""
  tokens = batch['tokens']
  first = tokens[:, 0] == 0
  length = 1 + ((tokens < 2).sum(1) + first.astype(jnp.int32)) // 3
  picks = jnp.arange(2 * STEPS).reshape(STEPS, 2)
  logit = jnp.where(first, variables['scale'], -1.0)
  return {
    'logits': jnp.stack([-logit, logit], 1)[:, None],
    'tape_length': length,
    'tape_indices': jnp.broadcast_to(picks, (len(tokens), STEPS, 2)),
    'flops': 100.0 + 10.0 * length.astype(jnp.float32),
    'full_flops': jnp.full(len(tokens), 140.0),
  }


VARIABLES = {'scale': jnp.float32(1.0)}


def build(workdir='', dataset=DATA, devices=1, given=outputs, **entry):
  put = rows_on(devices)
  context = eval_context(dataset, jax.jit(given), 64, workdir, put=put)
  entry = dict(type='adatape.difficulty:Evaluator') | entry
  run = {'dataset': dataset, 'evals': {'difficulty': entry}}
  checked = evaluator.validate(run)['difficulty']
  return evaluator.build('difficulty', checked, context)


def expected_rows():
  """(difficulty, tape length, is right) of each row, by a loop."""
  source = builder.build_source(DATA, 'test')
  for index in range(len(source)):
    row = source.record(index)
    tokens = row['tokens'].tolist()
    counted = sum(token < 2 for token in tokens)
    first = tokens[0] == 0
    yield counted, 1 + (counted + first) // 3, first == bool(row['label'])


@pytest.mark.parametrize('devices', [1, 8])
def test_evaluator_equals_a_loop(devices, tmp_path, capsys):
  result = build(tmp_path, devices=devices).run(VARIABLES)
  levels, lengths, right = map(np.array, zip(*expected_rows(), strict=True))
  assert set(levels) == set(range(1, 9))
  easy, hard = lengths[levels <= 2].mean(), lengths[levels >= 7].mean()
  assert result == pytest.approx({
    'spearman': np.corrcoef(rankdata(levels), rankdata(lengths))[0, 1],
    'easy_share': easy / hard,
    'flops_share': (100 + 10 * lengths).mean() / 140,
  })  # fmt: skip
  assert 0.8 < result['spearman'] < 1.0
  with (tmp_path / 'difficulty.csv').open(newline='') as file:
    table = list(csv.DictReader(file))
  assert [row['difficulty'] for row in table] == list('12345678')
  for row in table:
    here = levels == int(row['difficulty'])
    length = lengths[here]
    low, median, high = np.quantile(length, (0.25, 0.5, 0.75))
    numbers = {
      'rows': here.sum(), 'accuracy': right[here].mean(),
      'length_mean': length.mean(), 'length_std': length.std(),
      'length': median, 'length_low': low, 'length_high': high,
      'flops_mean': (100 + 10 * length).mean(), 'flops_std': 10 * length.std(),
      'flops': 100 + 10 * median, 'flops_low': 100 + 10 * low,
      'flops_high': 100 + 10 * high, 'full_flops': 140,
    }  # fmt: skip
    assert {k: float(row[k]) for k in numbers} == pytest.approx(numbers)
    assert row.keys() == {'difficulty', *numbers}
  for suffix in ('png', 'pdf'):
    assert (tmp_path / f'difficulty.{suffix}').stat().st_size > 10_000
  printed = capsys.readouterr().out
  for shown in ('1 to 2', '7 to 8', f'{easy:.2f} ±', f'{hard:.2f} ±', 'fixed'):
    assert shown in printed


@pytest.mark.parametrize(
  ('fields', 'field'),
  [
    (dict(dataset=DATA | dict(letters=0)), 'dataset'),
    (dict(split='train[:5%]'), 'split'),
  ],
)
def test_data_must_have_a_difficulty(fields, field):
  with pytest.raises(ConfigError, match=f'difficulty.{field}: expected'):
    build(**fields)


def test_examples_are_typical_rows_from_easy_to_hard():
  rows = {
    'difficulty': np.array([3, 1, 1, 1, 2, 7, 7]),
    'tape_length': np.array([4, 9, 3, 5, 4, 8, 6]),
  }
  # Of difficulty 1 the lengths are 3, 5, 9; of 7 the lower middle is taken.
  assert difficulty.examples(rows).tolist() == [3, 4, 0, 6]


def test_picture_shows_curves_and_what_each_step_reads(tmp_path, made):
  tokens = np.array([[0, 1, 3, 4], [0, 0, 1, 1]])
  indices = np.array([[[2, 3], [0, 0]], [[1, 0], [3, 2]]])
  rows = {
    'tokens': tokens, 'tape_indices': indices, 'difficulty': np.array([2, 4]),
    'tape_length': np.array([1, 2]), 'flops': np.array([1e3, 3e3]),
    'full_flops': np.array([3e3, 3e3]), 'label': np.array([1, 0]),
    'logits': np.zeros((2, 1, 2)),
  }  # fmt: skip
  table = [difficulty.summary(rows, np.array([k])) for k in (2, 4)]
  difficulty.draw(tmp_path / 'x', table, rows)
  length, cost, tapes = made[-1].axes
  for axes, adaptive, fixed in ((length, [1, 2], 2), (cost, [1, 3], 3)):
    mean, flat = axes.get_lines()
    assert mean.get_xdata().tolist() == flat.get_xdata().tolist() == [2, 4]
    assert mean.get_ydata().tolist() == adaptive
    assert flat.get_ydata().tolist() == [fixed] * 2
  assert length.get_ylabel() == 'tape tokens'
  assert cost.get_ylabel() == 'kFLOPs per input'
  texts = [text.get_text() for text in tapes.texts]
  shown = ['1', '-1', 'a', 'b', 'a', 'b', '', '', '1', '1', '-1', '-1']
  assert texts[: len(shown)] == [*shown]
  assert {'k = 2', 'k = 4'} <= set(texts)


def test_picture_is_readable(tmp_path, made, assert_readable):
  build(tmp_path).run(VARIABLES)
  assert_readable(made[-1], 60)


@pytest.mark.nightly
def test_outputs_are_rows_of_the_tape_and_its_cost():
  task, variables = tapes.build(tapes.PARITY | dict(vocab_size=13), DATA)
  params = variables['params']
  records = builder.build_source(DATA, 'test').records(np.arange(32))
  given = jax.jit(task.outputs)(params, {}, records)
  logits, out = jax.jit(task.apply)(params, {}, records)
  np.testing.assert_allclose(given['logits'], logits[:, None], atol=1e-5)
  np.testing.assert_array_equal(given['tape_indices'], out['tape']['indices'])
  length = given['tape_length'].tolist()
  assert length == out['tape']['length'].tolist()
  assert len(set(length)) > 1
  cost = [task.model.flops((8,), n) for n in length]
  np.testing.assert_allclose(given['flops'], cost, rtol=1e-6)
  full = [task.model.flops((8,))] * 32
  np.testing.assert_allclose(given['full_flops'], full, rtol=1e-6)
