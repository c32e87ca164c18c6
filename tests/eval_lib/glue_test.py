"""Official metrics by hand and by formula; nothing is ever NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataset_lib.errors import ConfigError, InvalidDataError
from dataset_lib.text_tasks import GLUE as TASKS
from eval_lib import evaluator, glue
from tests import contexts

PARITY = dict(name='parity', length=6, test_examples=37)


def logits_of(predicted, classes=2):
  return np.eye(classes, dtype=np.float32)[np.asarray(predicted)]


# Of class 1: 3 true and 1 false positive, 2 false negatives, 4 true negatives.
LABELS = np.array([1, 1, 1, 0, 1, 1, 0, 0, 0, 0])
PREDICTED = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
MATTHEWS = (3 * 4 - 1 * 2) / np.sqrt(4.0 * 5 * 5 * 6)


@pytest.mark.parametrize(
  ('task', 'expected'),
  [
    ('sst2', {'accuracy': 0.7}),
    ('qnli', {'accuracy': 0.7}),
    ('rte', {'accuracy': 0.7}),
    ('wnli', {'accuracy': 0.7}),
    ('cola', {'matthews': MATTHEWS}),
    ('mrpc', {'f1': 6 / 9, 'accuracy': 0.7}),
    ('qqp', {'f1': 6 / 9, 'accuracy': 0.7}),
  ],
)
def test_two_classes_by_hand(task, expected):
  result = glue.compute(task, logits_of(PREDICTED), LABELS)
  expected = expected | {'score': next(iter(expected.values()))}
  assert result == pytest.approx(expected)


def test_three_classes_by_hand():
  logits = logits_of([0, 1, 2, 2], classes=3)
  result = glue.compute('mnli', logits, np.array([0, 1, 2, 0]))
  assert result == {'accuracy': 0.75, 'score': 0.75}


def test_regression_against_the_formulas():
  rng = np.random.default_rng(0)
  labels = rng.uniform(0, 5, 40).astype(np.float32)
  predicted = labels**3 / 25 + rng.normal(size=40).astype(np.float32)
  result = glue.compute('stsb', predicted[:, None], labels)
  x, y = (v.astype(np.float64) - v.mean() for v in (predicted, labels))
  pearson = (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum())
  # Without ties: 1 - 6 sum d^2 / (n (n^2 - 1)).
  ranks = [v.argsort().argsort() for v in (predicted, labels)]
  spearman = 1 - 6 * ((ranks[0] - ranks[1]) ** 2).sum() / (40 * (40**2 - 1))
  expected = {'pearson': pearson, 'spearman': spearman, 'score': pearson}
  assert result == pytest.approx(expected, abs=1e-6)
  assert pearson != pytest.approx(spearman, abs=1e-3)


@pytest.mark.parametrize('task', sorted(TASKS))
@pytest.mark.parametrize('rows', [1, 2, 9])
@pytest.mark.parametrize('constant_labels', [False, True])
def test_constant_predictions_give_numbers(task, rows, constant_labels):
  """Matthews and the correlations are 0: nothing of the label is predicted."""
  kind = TASKS[task]
  regression = kind.num_classes == 1
  labels = np.arange(rows) % 2 * (not constant_labels)
  labels = labels.astype(np.float32 if regression else np.int32)
  for value in (0.0, 1.0):
    logits = np.full((rows, kind.num_classes), value, np.float32)
    if not regression:
      logits[:, int(value)] += 1
    result = glue.compute(task, logits, labels)
    assert np.isfinite(list(result.values())).all()
    for name in {'matthews', 'pearson', 'spearman'} & set(result):
      assert result[name] == 0.0


def test_f1_of_constant_predictions():
  all_positive = glue.compute('qqp', logits_of([1] * 10), LABELS)
  assert all_positive['f1'] == pytest.approx(2 * 5 / (10 + 5))
  none_positive = glue.compute('qqp', logits_of([0] * 10), LABELS)
  assert none_positive == {'f1': 0.0, 'accuracy': 0.5, 'score': 0.0}


def test_hidden_labels_and_wrong_shapes_are_errors():
  with pytest.raises(InvalidDataError, match='hidden'):
    glue.compute('sst2', logits_of([0, 1]), np.array([-1, -1]))
  with pytest.raises(InvalidDataError, match=r'stsb: .*\[0, 5.0\].*hidden'):
    glue.compute(
      'stsb', np.zeros((2, 1), np.float32), np.array([-1.0, -1.0], np.float32)
    )
  with pytest.raises(ValueError, match='mnli: expected 3 logits'):
    glue.compute('mnli', logits_of([0, 1]), np.array([0, 1]))
  with pytest.raises(InvalidDataError, match='no example'):
    glue.compute('sst2', np.zeros((0, 2)), np.zeros(0, np.int32))


def outputs(variables, batch):
  """Two heads: one that says 0, one that knows parity of all but token 0."""
  ones = (batch['tokens'][:, 1:] == 0).sum(1)
  answer = jax.nn.one_hot(ones % 2, 2)
  zero = jnp.zeros_like(answer).at[:, 0].set(1.0)
  return {'logits': jnp.stack([zero, answer], 1)}


def build(entry, dataset=PARITY, batch_size=16):
  context = contexts.eval_context(dataset, jax.jit(outputs), batch_size)
  return evaluator.build('dev', dict(type='glue') | entry, context)


@pytest.mark.parametrize('batch_size', [37, 16])
def test_evaluator_judges_the_last_head(batch_size):
  entry = dict(split='test', task='qqp', every_steps=3)
  built = build(entry, batch_size=batch_size)
  assert built.every_steps == 3
  tokens, labels = [], []
  for batch in built._data.batches():
    real = batch['mask'] > 0
    tokens.append(batch['tokens'][real])
    labels.append(batch['label'][real])
  tokens, labels = np.concatenate(tokens), np.concatenate(labels)
  answer = (tokens[:, 1:] == 0).sum(1) % 2
  assert len(labels) == 37
  hits = ((answer == 1) & (labels == 1)).sum()
  f1 = 2 * hits / ((answer == 1).sum() + (labels == 1).sum())
  accuracy = (answer == labels).mean()
  expected = {'f1': f1, 'accuracy': accuracy, 'score': f1}
  assert built.run({}) == pytest.approx(expected)
  assert 0.3 < accuracy < 1.0


def test_task_must_be_known_and_fit_the_data():
  field = r'^evals.dev.task: expected'
  with pytest.raises(ConfigError, match=rf"{field} one of .*got ''"):
    build(dict(split='test'))
  with pytest.raises(ConfigError, match=f'{field} a task with the 2'):
    build(dict(split='test', task='mnli'))


def test_task_is_the_data_sets_own_unless_given():
  def task_of(own, given=''):
    return glue.task_of(given, dict(name='glue', task=own))

  assert task_of('mrpc') == 'mrpc'
  assert task_of('mrpc', 'qqp') == 'qqp'
  assert task_of('something') == ''
