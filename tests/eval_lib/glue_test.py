"""Official metrics by hand and by formula; nothing is ever NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import ConfigError, InvalidDataError
from dataset_lib.text_tasks import GLUE as TASKS
from eval_lib import glue
from tests.contexts import evaluator_of

PARITY = dict(name='parity', length=6, test_examples=37)


def logits_of(predicted, classes=2):
  return np.eye(classes, dtype=np.float32)[np.asarray(predicted)]


# Of class 1: 3 true and 1 false positive, 2 false negatives, 4 true negatives.
LABELS = np.array([1, 1, 1, 0, 1, 1, 0, 0, 0, 0])
PREDICTED = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
MATTHEWS = (3 * 4 - 1 * 2) / np.sqrt(4.0 * 5 * 5 * 6)


@pytest.mark.parametrize(
  ('task', 'predicted', 'expected'),
  [
    *((task, PREDICTED, {'accuracy': 0.7})
      for task in ('sst2', 'qnli', 'rte', 'wnli')),
    ('cola', PREDICTED, {'matthews': MATTHEWS}),
    ('mrpc', PREDICTED, {'f1': 6 / 9, 'accuracy': 0.7}),
    ('qqp', PREDICTED, {'f1': 6 / 9, 'accuracy': 0.7}),
    ('qqp', [1] * 10, {'f1': 2 * 5 / (10 + 5), 'accuracy': 0.5}),
    ('qqp', [0] * 10, {'f1': 0.0, 'accuracy': 0.5}),
    ('mnli', [1, 1, 1, 0, 1, 1, 2, 0, 0, 2], {'accuracy': 0.8}),
  ],
)  # fmt: skip
def test_classes_by_hand(task, predicted, expected):
  logits = logits_of(predicted, TASKS[task].num_classes)
  expected = expected | {'score': next(iter(expected.values()))}
  assert glue.compute(task, logits, LABELS) == pytest.approx(expected)


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
@pytest.mark.parametrize('rows', [1, 9])
@pytest.mark.parametrize('constant_labels', [False, True])
def test_constant_predictions_give_numbers(task, rows, constant_labels):
  classes = TASKS[task].num_classes
  labels = np.arange(rows) % 2 * (not constant_labels)
  labels = labels.astype(np.float32 if classes == 1 else np.int32)
  for value in (0, 1):
    logits = np.full((rows, 1), value, np.float32)
    if classes > 1:
      logits = logits_of([value] * rows, classes)
    result = glue.compute(task, logits, labels)
    assert np.isfinite(list(result.values())).all()
    # Nothing of the label is predicted.
    for name in {'matthews', 'pearson', 'spearman'} & set(result):
      assert result[name] == 0.0


@pytest.mark.parametrize(
  ('task', 'shape', 'labels', 'error', 'match'),
  [
    ('sst2', (2, 2), [0, -1], InvalidDataError,
     r'sst2: expected labels in \[0, 1\], got -1 and 0 other .*hidden'),
    ('mrpc', (2, 2), [3, 1], InvalidDataError, 'got 3 '),
    ('stsb', (2, 1), [-1.0, -1.0], InvalidDataError,
     r'stsb: .*\[0, 5.0\].*hidden'),
    ('mnli', (2, 2), [0, 1], ValueError, 'mnli: expected 3 logits'),
    ('sst2', (0, 2), [], InvalidDataError, 'no example'),
  ],
)  # fmt: skip
def test_hidden_labels_and_wrong_shapes_are_errors(
  task, shape, labels, error, match
):
  with pytest.raises(error, match=match):
    glue.compute(task, np.zeros(shape, np.float32), np.array(labels))


def outputs(variables, batch):
  """Two heads: one that says 0, one that knows parity of all but token 0."""
  ones = (batch['tokens'][:, 1:] == 0).sum(1)
  answer = jax.nn.one_hot(ones % 2, 2)
  return {'logits': jnp.stack([answer.at[:].set([1.0, 0.0]), answer], 1)}


def build(task):
  context = dict(outputs=jax.jit(outputs), batch_size=16)
  return evaluator_of('glue', PARITY, context, split='test', task=task)


def test_evaluator_judges_the_last_head():
  built = build('qqp')
  source = built.splits['split'].source
  rows = [source.record(row) for row in range(len(source))]
  answer = np.array([(row['tokens'][1:] == 0).sum() % 2 for row in rows])
  labels = np.array([row['label'] for row in rows])
  hits = ((answer == 1) & (labels == 1)).sum()
  f1 = 2 * hits / ((answer == 1).sum() + (labels == 1).sum())
  accuracy = (answer == labels).mean()
  expected = {'f1': f1, 'accuracy': accuracy, 'score': f1}
  assert built.run({}) == pytest.approx(expected)
  assert 0.3 < accuracy < 1.0


@pytest.mark.parametrize(
  ('task', 'expected'), [('', "one of .*got ''"), ('mnli', 'a task with the 2')]
)
def test_task_must_be_known_and_fit_the_data(task, expected):
  with pytest.raises(ConfigError, match=rf'\.task: expected {expected}'):
    build(task)


@pytest.mark.parametrize(
  ('given', 'own', 'task'),
  [('', 'mrpc', 'mrpc'), ('qqp', 'mrpc', 'qqp'), ('', 'something', '')],
)
def test_task_is_the_data_sets_own_unless_given(given, own, task):
  assert glue.task_of(given, dict(name='glue', task=own)) == task
