"""Precision@1 by hand, what does not fit, and several labels when served."""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adatape.task import PonderMultiLabel, TapeMultiLabel
from benchmarks import adaptivity, tape_report
from benchmarks.tape_report import Tapes
from core.errors import ConfigError
from dataset_lib import builder
from dataset_lib.source import DatasetInfo
from eval_lib import predictions
from serve_lib import bundle
from serve_lib.chain import Grid
from serve_lib.engine import Engine
from serve_lib.programs import Programs
from tests import fakes
from train_lib import config_schema
from train_lib.build import Setup
from train_lib.multi_label import MultiLabel

MODEL = dict(
  name='model_lib.vit:ViT', width=8, depth=1, mlp_dim=8, num_heads=2,
  patch_size=8,
)  # fmt: skip
PLAIN = dict(name='tests.fakes:FakeImages', image_size=16)
LABELS = [[0, 3], [3], [], [2, 1, 0], [1, 1]]


class Hand(MultiLabel):
  """A task without a model."""

  def build_model(self):
    return None


def hand():
  info = DatasetInfo('image', (8, 8, 3), 'uint8', 4, (), 5, max_labels=3)
  return Hand({'loss': {'label_smoothing': 0.0, 'mixup': 0.0}}, info)


def batch_of(mask):
  label = [[*row, *[-1] * (3 - len(row))] for row in LABELS]
  return {'label': jnp.array(label), 'mask': jnp.array(mask)}


def test_precision_at_1_by_hand():
  # The largest logits are those of classes 3, 0, 0, 2, 1.
  logits = jax.nn.one_hot(jnp.array([3, 0, 0, 2, 1]), 4)
  task = hand()
  half = task.cross_entropy(logits.astype(jnp.bfloat16), batch_of([1.0] * 5))
  assert half.dtype == jnp.float32
  task.apply = lambda *_: (logits, {})
  task.cross_entropy = lambda *_: jnp.arange(5.0)
  for mask, right, mean in (
    ([1.0] * 5, 3 / 5, 2.0),
    ([1.0, 1.0, 0.0, 0.0, 0.0], 1 / 2, 0.5),
    ([0.0, 1.0, 1.0, 0.0, 0.0], 0.0, 1.5),
  ):
    metrics = task.evaluate({}, {}, batch_of(mask))
    assert metrics['accuracy'].compute() == pytest.approx(right)
    assert metrics['cross_entropy'].compute() == pytest.approx(mean)


@dataclasses.dataclass(kw_only=True, eq=False)
class SeveralLabels(fakes.FakeImages):
  """Images with up to `max_labels` classes."""

  max_labels: int = 3

  def __post_init__(self):
    super().__post_init__()
    kind = 'classes' if self.max_labels else 'class'
    self.info = dataclasses.replace(
      self.info, max_labels=self.max_labels, label_kind=kind
    )


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'loss': {'label_smoothing': 0.1}},
     'loss.label_smoothing: expected 0: a sigmoid'),
    ({'task': 'train_lib.classification:Classification'},
     'dataset.max_labels: expected 0, one label a row, for Classification'),
    ({'dataset': PLAIN},
     'dataset.max_labels: expected >= 1 for MultiLabel'),
    ({'batch_size': 8},
     'batch_size: expected a multiple of 16: .*num_micro=2 times 2 rows'),
  ],
)  # fmt: skip
def test_what_does_not_fit(changes, message):
  name = 'tests.train_lib.multi_label_test:SeveralLabels'
  config = dict(
    task='train_lib.multi_label:MultiLabel', model=MODEL, batch_size=16,
    num_micro=2, mesh=dict(data=4), loss=dict(mixup=0.2),
    dataset=dict(name=name, image_size=16), phases=(dict(steps=3),),
  )  # fmt: skip
  with pytest.raises(ConfigError, match=message):
    Setup(config_schema.validate(config | changes))


TAPE = dict(
  name='adatape.model:AdaTapeViT', width=16, depth=2, mlp_dim=16, num_heads=2,
  patch_size=8, bank='learnable', bank_size=20, tokens_per_step=2, max_steps=4,
  query_dim=8,
)  # fmt: skip


STEPS = MODEL | dict(name='adatape.universal:UniversalViT', max_steps=2)
del STEPS['depth']


@pytest.fixture(scope='module', params=[
  (MultiLabel, MODEL), (TapeMultiLabel, TAPE), (PonderMultiLabel, STEPS),
], ids=['vit', 'tape', 'steps'])  # fmt: skip
def served(request):
  """(task, variables, images) with random weights."""
  kind, model = request.param
  data = dict(name='tests.fakes:FakeImages', image_size=16, num_classes=4)
  loss = dict(label_smoothing=0.0, tape_weight=0.0, ponder_weight=0.0)
  # ONNX Runtime, if it is installed, needs 'gap' under the type checks here.
  model = model | {'pool': 'gap'}
  config = dict(model=model, loss=loss, dtype='float32', dataset=data)
  info = dataclasses.replace(
    builder.build_source(data, 'test').info, max_labels=3
  )
  task, rng = kind(config, info), np.random.default_rng(0)
  params = jax.tree.map(
    lambda leaf: leaf + rng.normal(size=leaf.shape).astype('f'),
    nn.unbox(jax.jit(task.init)(jax.random.key(0))[0]),
  )
  images = rng.integers(256, size=(6, 16, 16, 3)).astype(np.uint8)
  return task, {'params': params, 'model_state': {}}, images


@pytest.mark.parametrize('backend', ['xla', 'auto', 'bundle'])
def test_served_probabilities_are_sigmoids(served, backend, tmp_path):
  task, variables, images = served
  given = {'image': jnp.asarray(images)}
  logits = jax.jit(task.apply)(variables['params'], {}, given)[0]
  expected = 1 / (1 + np.exp(-np.asarray(logits, float)))
  chain, policy = task.serve(variables, {})
  grid = Grid(tuple(policy.lengths), (2,))
  if backend == 'bundle':
    path = tmp_path / 'a.bundle'
    bundle.write(path, Programs(chain, grid), policy, {})
    chain, policy, grid = bundle.read(path)
  name = 'xla' if backend == 'bundle' else backend
  sizes = grid.lengths, grid.batches
  with Engine(chain, policy, *sizes, backend=name) as engine:
    answers = [one.as_dict() for one in engine.predict([*images])]
  names = task.label_names
  for one, row in zip(answers, expected, strict=True):
    np.testing.assert_allclose([*one['probabilities'].values()], row, atol=1e-5)
    order = np.argsort(-row)
    assert one['label'] == names[order[0]]
    assert one['labels'] == tuple(names[i] for i in order if row[i] >= 0.5)
  assert any(0 < len(one['labels']) < len(names) for one in answers)


def test_answers_of_one_or_several_labels_by_hand():
  logits = np.array([[0.0, 0.0, 0.0], [99.0, -99.0, 0.0], [1e4, -1e4, -1e4]])
  nats = math.log(2)
  for several, expected in ((0, [math.log(3), 0, 0]), (2, [3 * nats, nats, 0])):
    found = adaptivity.entropy(logits.astype(np.float32), several)
    assert found == pytest.approx(expected)
  for labels, right, texts in (
    ([0, 1, 0], [1, 0, 1], ['a', 'b', 'a']),
    ([[0, 1], [2, -1], [-1, -1]], [1, 0, 0], ['a, b', 'c', '']),
  ):
    assert predictions.correct(logits, np.array(labels)).tolist() == right
    assert [predictions.label_text(x, 'abc') for x in labels] == texts


def test_tapes_of_rows_of_several_labels():
  label = np.array([[0, 2], [2, -1], [1, 2], [2, 0]])
  one = dict(
    index=np.arange(4), label=label, correct=np.array([1, 1, 0, 1], bool),
    length=np.array([1, 2, 3, 4]), picks=np.zeros((4, 4, 1), int),
    input_tokens=4, bank_size=2, max_steps=4,
  )  # fmt: skip
  tables = tape_report.tables(Tapes(**one), (0, 0), ('a', 'b', 'c'))
  rows = {row['class']: (row['rows'], row['mean']) for row in tables[2].rows}
  assert rows == {'a': (2, 2.5), 'c': (4, 2.5), 'b': (1, 3.0)}
