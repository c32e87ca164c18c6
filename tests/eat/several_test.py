"""Several tasks of one model are those of models of one task."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from core.errors import ConfigError
from dataset_lib.source import labels_of, tasks_of
from eat.chain import EatChain
from eat.policy import ExitPolicy
from eat.several import SeveralTasks
from eat.several_policy import SeveralPolicy
from halting.row_rules import Confidence, Margin
from serve_lib import bundle, description
from serve_lib.chain import Grid, checked
from serve_lib.engine import Engine
from serve_lib.items import TextReader
from serve_lib.monitor import Monitor, monitor_of
from serve_lib.programs import Programs
from tests import losses
from tests.eat import small, task_test
from tests.serve_lib import toy

NAMES = 'domain=a', 'domain=b', 'domain=c', 'size=long', 'size=short'
CLASSES = {'domain': ('a', 'b', 'c'), 'size': ('long', 'short')}
COLUMNS = {'domain': slice(0, 3), 'size': slice(3, 5)}
# Of 6 rows and 2 of padding: ids of all classes, in any order; -1 is none.
LABELS = [[0, 3], [2, -1], [-1, 4], [4, 1], [1, -1], [-1, 2], [0, 3], [0, 3]]
OWN = {'domain': [0, 2, -1, 1, 1, 2], 'size': [0, -1, 1, 1, -1, -1]}
TEMPERATURES = {'domain': (2.0, 1.0, 1.5), 'size': (1.0, 0.7, 1.0)}
RULES = {'domain': Confidence(0.5), 'size': Margin(0.5)}
WEIGHTS = np.array(task_test.WEIGHTS)


def info():
  return dataclasses.replace(
    small.info(5), class_names=NAMES, label_kind='tasks', max_labels=2
  )


def test_labels_are_cut_by_task():
  assert tasks_of(NAMES) == COLUMNS == info().tasks
  assert small.info(5).tasks == {}
  for name, expected in OWN.items():
    found = labels_of(np.array(LABELS), COLUMNS[name])
    assert found[:6].tolist() == expected


def case(**loss):
  """(task, batch with two rows of padding, parameters)."""
  batch = small.labelled(small.batch(small.rows(8), 20), 5, 6)
  batch['label'] = jnp.array(LABELS, jnp.int32)
  params = small.build(num_classes=5)[1]['params']
  return SeveralTasks(task_test.config(**loss), info()), batch, params


def test_loss_is_the_mean_of_the_tasks_over_their_rows():
  task, batch, params = case()
  loss, metrics = losses.of(task)(params, batch)
  exits = task_test.logits_of(task, params, batch)
  means, accuracies = [], []
  for name, labels in OWN.items():
    logits = exits[..., COLUMNS[name]]
    rows = [n for n, label in enumerate(labels) if label >= 0]
    own = -log_softmax(logits, -1)[:, rows, [labels[n] for n in rows]]
    means.append(WEIGHTS @ own.mean(1))
    hits = [int(logits[-1, n].argmax()) == labels[n] for n in rows]
    accuracies.append(np.mean(hits))
    found = metrics[f'accuracy_{name}'].compute()
    np.testing.assert_allclose(found, np.mean(hits), rtol=1e-6)
    found = metrics[f'cross_entropy_{name}'].compute()
    np.testing.assert_allclose(found, own[-1].mean(), rtol=1e-5)
  np.testing.assert_allclose(loss, np.mean(means), rtol=1e-5)
  accuracy = metrics['accuracy'].compute()
  np.testing.assert_allclose(accuracy, np.mean(accuracies), rtol=1e-6)
  assert 'accuracy_exit_1_size' in metrics
  # Of all rows, not only of those that the last task labels.
  everyone = batch | {'label': jnp.zeros(batch['label'].shape, int)}
  expected = losses.of(task)(params, everyone)[1]['retention'].compute()
  assert metrics['retention'].compute() == expected


def test_a_teacher_is_followed_by_task():
  task, batch, params = case(exit_weights=(0.0, 0.0, 0.0))
  other = small.randomised(params, seed=3)
  task.teacher = types.SimpleNamespace(task=task)
  frozen = {'params': other, 'model_state': {}}
  given = losses.of(task)(params, batch, frozen=frozen)[0]
  teacher = task_test.logits_of(task, other, batch)[-1]
  student = task_test.logits_of(task, params, batch)[-1]
  expected = []
  for name, labels in OWN.items():
    cut, rows = COLUMNS[name], np.array(labels) >= 0
    target, own = (log_softmax(x[:, cut] / 2, -1) for x in (teacher, student))
    divergence = (np.exp(target) * (target - own)).sum(-1)
    expected.append(0.5 * 4 * divergence[:6][rows].mean())
  np.testing.assert_allclose(given, np.mean(expected), rtol=1e-4)


def test_data_of_one_task_are_refused():
  with pytest.raises(ConfigError, match=r"dataset\.kind: .*'tasks'"):
    SeveralTasks(task_test.config(), small.info(3))


def cut(columns, path, leaf):
  """The columns of a task, of the last layer of a head."""
  return leaf[..., columns] if path[-2].key == 'head' else leaf


def policies(drift=None):
  """(policy of both tasks, policy of each with the same weights)."""
  model, variables = small.build(num_classes=5)
  reader = TextReader(None, 24, vocab_size=50)
  alone, tasks = {}, {}
  for name, columns in COLUMNS.items():
    own = dict(rule=RULES[name], temperatures=TEMPERATURES[name])
    part = jax.tree_util.tree_map_with_path(
      functools.partial(cut, columns), variables
    )
    one = model.clone(num_classes=len(CLASSES[name]))
    chain = EatChain(one, part, reader)
    alone[name] = ExitPolicy(chain, reader, CLASSES[name], (16, 24), **own)
    tasks[name] = {'class_names': CLASSES[name], **own}
  chain = EatChain(model, variables, reader)
  policy = SeveralPolicy(
    chain, reader, NAMES, (16, 24), tasks=tasks,
    monitor=monitor_of(drift) if drift else Monitor(),
  )  # fmt: skip
  return policy, alone


def ask(policy, items, lengths=(16, 24), batches=(1, 4)):
  with Engine(policy.chain, policy, lengths, batches, lazy=True) as engine:
    return checked(engine.predict(items))


ITEMS = [{'tokens': row.tolist()} for row in small.rows(24, seed=5)]


def test_each_task_is_answered_as_by_its_own_model():
  together, alone = policies()
  answers = ask(together, ITEMS)
  depths = []
  for name, policy in alone.items():
    expected = ask(policy, ITEMS)
    for given, want in zip(answers, expected, strict=True):
      own = given.tasks[name]
      assert (own.label, own.fields) == (want.label, want.fields)
      shares = [[*one.probabilities.values()] for one in (own, want)]
      np.testing.assert_allclose(*shares, atol=1e-5)
    depths.append([one.fields['depth'] for one in expected])
  # Rows leave tasks at different heads, and the row at the last of them.
  pairs = {*map(tuple, np.array(depths).T.tolist())}
  assert len(pairs) > 2
  assert any(domain != size for domain, size in pairs)
  assert [one.fields['depth'] for one in answers] == np.max(depths, 0).tolist()
  snapshot = together.monitor.snapshot()
  assert sum(snapshot['depth'].values()) == len(ITEMS)
  seen = answers[0].as_dict()
  assert {*seen} == {'tasks', 'depth', 'retention', 'exit_reason', 'truncated'}
  assert seen['tasks']['size']['label'] in CLASSES['size']


def test_drift_of_a_task_keeps_the_others():
  check = {'confidences': [0.5, 0.9], 'threshold': 0.75}
  together, _ = policies({'domain': check, 'size=forum': check})
  checks = together.monitor.sources
  checks['domain'].drifted = True
  with Engine(together.chain, together, (16, 24), (1,), lazy=True) as engine:
    found = {one.name: one for one in description.metrics(engine, {})}
  drifted = found['engine_drift_by_source_drifted'].samples
  assert [one.labels for one in drifted] == [
    {'task': 'domain', 'source': ''},
    {'task': 'size', 'source': 'forum'},
  ]
  answers = ask(together, ITEMS)
  assert {one.tasks['domain'].fields['depth'] for one in answers} == {4}
  reasons = {one.tasks['domain'].fields['exit_reason'] for one in answers}
  assert 'full depth' in reasons
  assert 1 in {one.tasks['size'].fields['depth'] for one in answers}
  # A check has the confidences of its own task, and source.
  count = len(checks['domain']._rows)
  ask(together, [{**item, 'source': 'forum'} for item in ITEMS[:5]])
  assert len(checks['size=forum']._rows) == 5
  assert len(checks['domain']._rows) == count + 5


@pytest.mark.slow
def test_a_bundle_and_a_description_have_the_tasks(tmp_path):
  together, _ = policies()
  path, grid = tmp_path / 'several', Grid((16, 24), (1, 4))
  bundle.write(path, Programs(together.chain, grid), together, {})
  chain, policy, grid = bundle.read(path)
  with Engine(chain, policy, grid.lengths, grid.batches) as engine:
    answers, about = engine.predict(ITEMS), description.about(engine, 'tasks')
    toy.check_schema(engine, answers[0].as_dict())
    samples = {
      tuple(one.labels.values()): one.value
      for metric in description.metrics(engine, {})
      for one in metric.samples if one.name == 'engine_task_depth_total'
    }  # fmt: skip
  depths = [one.tasks['size'].fields['depth'] for one in answers]
  assert samples['size', '1'] == depths.count(1) > 0
  assert not {'several', 'temperatures'} & {*about['options']}
  for given, want in zip(answers, ask(together, ITEMS), strict=True):
    assert given.label == want.label
    for name, own in given.tasks.items():
      assert own.fields == want.tasks[name].fields
      shares = [
        [*one.probabilities.values()] for one in (own, want.tasks[name])
      ]
      np.testing.assert_allclose(*shares, atol=1e-5)
  assert about['labels'] == [*NAMES]
  assert 'probabilities' in about['answer']['tasks']['<name>']
  schema = description.openapi(about)['paths']['/predict']['post']['responses']
  content = schema['200']['content']['application/json']['schema']
  assert content['anyOf'][0]['required'] == ['tasks']


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'temperatures': (1.0,)}, r'tasks\.size\.temperatures: .*3 of them'),
    ({'class_names': ('x',)}, r'tasks\.size\.class_names: .*2 of them'),
    ({'rule': {'name': 'os:system'}}, r'tasks\.size\.rule'),
    ({'chain': 1}, r'tasks\.size\.chain'),
  ],
)
def test_fields_of_a_task_are_checked(changes, message):
  policy = policies()[0]
  tasks = policy.tasks | {'size': policy.tasks['size'] | changes}
  with pytest.raises(ConfigError, match=message):
    dataclasses.replace(policy, tasks=tasks)
  with pytest.raises(ConfigError, match=r'policy\.tasks: .*domain'):
    dataclasses.replace(policy, tasks={'size': policy.tasks['size']})
