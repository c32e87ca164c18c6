"""The sigmoid loss and precision@1 by hand, and a run on records."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataset_lib.errors import ConfigError
from dataset_lib.source import DatasetInfo
from tests.dataset_lib import example_files
from train_lib import config_schema
from train_lib.build import Setup
from train_lib.multi_label import MultiLabel

MODEL = dict(
  name='model_lib.vit:ViT', width=8, depth=1, mlp_dim=8, num_heads=2,
  patch_size=8,
)  # fmt: skip
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


def test_the_loss_is_the_sum_over_the_classes():
  logits = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32) * 9
  batch = batch_of([1.0] * 5)
  for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)):
    given = jnp.asarray(logits, dtype)
    loss = hand().cross_entropy(given, batch)
    assert loss.dtype == jnp.float32
    for row, labels in enumerate(LABELS):
      expected = sum(
        math.log1p(math.exp(-z if k in labels else z))
        for k, z in enumerate(given[row].astype(float).tolist())
      )
      assert float(loss[row]) == pytest.approx(expected, rel=tolerance)


def test_precision_at_1_by_hand():
  # The largest logits are those of classes 3, 0, 0, 2, 1.
  logits = jax.nn.one_hot(jnp.array([3, 0, 0, 2, 1]), 4)
  entropy = jnp.arange(5.0)
  for mask, right, mean in (
    ([1.0] * 5, 3 / 5, 2.0),
    ([1.0, 1.0, 0.0, 0.0, 0.0], 1 / 2, 0.5),
    ([0.0, 1.0, 1.0, 0.0, 0.0], 0.0, 1.5),
  ):
    metrics = hand().quality(logits, entropy, batch_of(mask))
    assert metrics['accuracy'].compute() == pytest.approx(right)
    assert metrics['cross_entropy'].compute() == pytest.approx(mean)


@pytest.fixture
def config(tmp_path, monkeypatch):
  """A run on 16 images of 5 classes in two shards."""
  pytest.importorskip('tensorflow_datasets')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  records = [
    example_files.example(example_files.jpeg(15 * i), LABELS[i % 5])
    for i in range(16)
  ]
  for shard in range(2):
    path = tmp_path / 'data' / f'train-{shard}.tfrecord'
    example_files.write(path, records[8 * shard :][:8])
  return dict(
    task='train_lib.multi_label:MultiLabel',
    model=MODEL,
    batch_size=16,
    num_micro=2,
    mesh=dict(data=4),
    loss=dict(mixup=0.2),
    loader=dict(num_threads=0),
    dataset=dict(
      name='records', directory=str(tmp_path / 'data'), num_classes=5,
      max_labels=3, image_size=16,
      augment=('inception_crop', 'flip', 'randaugment'),
    ),
    stages=dict(stage1=dict(steps=3)),
    evals=dict(val=dict(type='classification', split='train[75%:]')),
  )  # fmt: skip


@pytest.mark.slow
def test_a_step_and_an_evaluation(config):
  setup = Setup(config_schema.validate(config))
  state, stage = setup.init(), setup.stages[0]
  before = jax.device_get(state.params)
  with jax.set_mesh(setup.mesh):
    batch = setup.put(next(setup.dataset.batches()))
    assert batch['label'].shape == (16, 3)
    step, _ = setup.step(stage, batch)
    state, metrics = step(state, setup.frozen, batch, stage.knob_values(0))
    [evaluation] = setup.evaluators['stage1'].values()
    results = evaluation.run(state.variables)
  # Logits of a fresh head are 0: each of 5 classes costs log 2.
  assert metrics['loss'].compute() == pytest.approx(5 * math.log(2), abs=0.5)
  assert 0 < metrics['grad_norm'].compute() < math.inf
  changed = jax.tree.map(
    lambda a, b: np.abs(a - b).max(), before, jax.device_get(state.params)
  )
  assert max(jax.tree.leaves(changed)) > 0
  assert 0 <= results['accuracy'] <= 1
  assert 0 < results['cross_entropy'] < 5


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'loss': {'label_smoothing': 0.1}},
     'loss.label_smoothing: expected 0: a sigmoid'),
    ({'task': 'train_lib.classification:Classification'},
     'dataset.max_labels: expected 0, one label a row, for Classification'),
    ({'dataset': {'max_labels': 0}},
     'dataset.max_labels: expected >= 1 for MultiLabel'),
    ({'batch_size': 8},
     'batch_size: expected a multiple of 16: .*num_micro=2 times 2 rows'),
  ],
)  # fmt: skip
def test_what_does_not_fit(config, changes, message):
  for name, value in changes.items():
    both = isinstance(value, dict)
    config[name] = {**config[name], **value} if both else value
  with pytest.raises(ConfigError, match=message):
    Setup(config_schema.validate(config))
