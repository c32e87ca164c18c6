"""Mixup against a loop in NumPy; pairs never leave their device."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
import scipy.stats

from dataset_lib.source import DatasetInfo
from train_lib import mixup, sharding
from train_lib.classification import Classification
from train_lib.multi_label import MultiLabel
from train_lib.train_step import init_state, make_train_step

ROWS, CLASSES = 16, 5


class Linear(nn.Module):
  """Logits are a linear map of the pixels."""

  num_classes: int = CLASSES

  @nn.compact
  def __call__(self, images, row_keys=None):
    features = images.reshape(len(images), -1)
    return nn.Dense(self.num_classes)(features), {'features': features}


class Softmax(Classification):
  def build_model(self):
    return Linear()


class Sigmoid(MultiLabel):
  def build_model(self):
    return Linear()


def task_of(kind=Softmax, alpha=0.5, smoothing=0.1):
  most = 3 if kind is Sigmoid else 0
  smoothing = 0.0 if most else smoothing  # as `MultiLabel` requires
  info = DatasetInfo(
    'image', (2, 2, 3), 'uint8', CLASSES, (), 99, max_labels=most
  )
  return kind({'loss': {'mixup': alpha, 'label_smoothing': smoothing}}, info)


def batch_of(kind=Softmax, rows=ROWS):
  rng = np.random.default_rng(0)
  label = rng.integers(CLASSES, size=rows).astype(np.int32)
  if kind is Sigmoid:
    label = rng.integers(-1, CLASSES, size=(rows, 3)).astype(np.int32)
  image = rng.integers(256, size=(rows, 2, 2, 3)).astype(np.uint8)
  mask = np.ones(rows, np.float32)
  mask[[5, -1]] = 0
  return {'image': image, 'label': label, 'mask': mask}


def keys_of(rows):
  return jax.random.split(jax.random.key(1), rows)


@pytest.mark.parametrize('alpha', [0.2, 0.5, 1.0, 8.0])
def test_shares_are_the_larger_part_of_a_beta(alpha):
  share = np.asarray(mixup.shares(keys_of(4000), jnp.ones(4000), alpha))
  assert share.min() >= 0.5
  assert share.max() <= 1.0
  cdf = scipy.stats.beta(alpha, alpha).cdf
  # Shares within a float of 1 are 1, so the test is on coarse values.
  grid = np.linspace(0.5, 0.999, 50)
  counted = (share[:, None] <= grid).mean(0)
  assert np.abs(counted - (2 * cdf(grid) - 1)).max() < 0.03
  few = mixup.shares(keys_of(4000)[:6], jnp.ones(6), alpha)
  np.testing.assert_array_equal(few, share[:6])


def expected_of(kind, params, batch, share, smoothing):
  """Mean loss, its gradient, and mean metric of unmixed labels; float64."""
  kernel, bias = (
    np.asarray(params['Dense_0'][name], np.float64)
    for name in ('kernel', 'bias')
  )
  part, other = np.float64(share)[:, None], np.arange(ROWS) ^ 1
  own = np.zeros((ROWS, CLASSES))
  for row, labels in enumerate(batch['label'].reshape(ROWS, -1)):
    own[row, labels[labels >= 0]] = 1.0
  x = batch['image'].reshape(ROWS, -1) / 127.5 - 1.0
  x, target = (part * y + (1 - part) * y[other] for y in (x, own))
  z, rows = x @ kernel + bias, batch['mask'] > 0
  if kind is Softmax:
    target = target * (1 - smoothing) + smoothing / CLASSES
    logs = scipy.special.log_softmax(z, 1)
    predicted = np.exp(logs)
    losses = [-(y * logs).sum(1) for y in (target, own)]
  else:
    predicted = scipy.special.expit(z)
    losses = [
      -(y * np.log(predicted) + (1 - y) * np.log1p(-predicted)).sum(1)
      for y in (target, own)
    ]
  gradient = x[rows].T @ (predicted - target)[rows] / rows.sum()
  return losses[0][rows].mean(), gradient, losses[1][rows].mean()


def ready(kind):
  task, batch = task_of(kind), jax.tree.map(jnp.asarray, batch_of(kind))
  params, _ = jax.jit(task.init)(jax.random.key(0))
  return task, params, batch, task.normalizers(batch)


@pytest.mark.parametrize('kind', [Softmax, Sigmoid])
def test_the_loss_and_its_gradient_by_a_loop(kind):
  task, params, batch, norm = ready(kind)
  keys = keys_of(ROWS)
  (loss, (metrics, *_)), gradient = jax.value_and_grad(
    lambda params: task.loss(params, {}, {}, batch, norm, keys, {}),
    has_aux=True,
  )(params)
  share, batch = mixup.shares(keys, batch['mask'], 0.5), batch_of(kind)
  assert share[4] == 1.0  # row 5 is padding
  smoothing = 0.1 if kind is Softmax else 0.0
  expected = expected_of(kind, params, batch, share, smoothing)
  np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
  np.testing.assert_allclose(
    gradient['Dense_0']['kernel'], expected[1], rtol=1e-5, atol=1e-5
  )
  entropy = metrics['cross_entropy'].compute()
  assert entropy == pytest.approx(expected[2], rel=1e-5)
  assert 0 <= metrics['accuracy'].compute() <= 1


def assert_mixes(task, params, batch):
  """The loss of a task is that of mixed images with both labels, row by row."""
  keys, mask = keys_of(len(batch['mask'])), batch['mask']
  share = np.asarray(mixup.shares(keys, mask, 0.5))
  assert share.min() < 0.99
  pixels, total = np.asarray(task.inputs(batch)), 0.0
  plain = jax.jit(lambda params, *given: task.loss(params, {}, {}, *given, {}))
  for row in np.flatnonzero(mask):
    for source, part in ((row, share[row]), (row ^ 1, 1 - share[row])):
      image = share[row] * pixels[row] + (1 - share[row]) * pixels[row ^ 1]
      one = {
        'image': jnp.asarray(image[None]),
        'label': batch['label'][source][None],
      }
      given = {**one, 'mask': jnp.ones(1)}, {'rows': 1.0}, None
      total += part * plain(params, *given)[0]
  task.config['loss'] |= {'mixup': 0.5}
  given = batch, task.normalizers(batch), keys, {}
  loss = task.loss(params, {}, {}, *given)[0]
  np.testing.assert_allclose(loss, total / mask.sum(), atol=1e-5)


@pytest.mark.parametrize('kind', [Softmax, Sigmoid])
def test_evaluation_mixes_nothing(kind):
  task, params, batch, _ = ready(kind)
  plain = task_of(kind, alpha=0.0)
  assert (task.rows_together, plain.rows_together) == (2, 1)
  measured = [t.evaluate(params, {}, batch) for t in (task, plain)]
  for name, value in measured[0].items():
    assert value.compute() == measured[1][name].compute()


def step_of(kind, alpha, devices, num_micro, rows=2 * ROWS):
  """(kernel after a step, compiled text)."""
  task, optimizer = task_of(kind, alpha), optax.sgd(lambda step: 0.1)
  mesh = sharding.make_mesh({'data': devices})
  state = sharding.unbox(init_state(task, optimizer, 0, 0.0))
  state = jax.device_put(state, sharding.replicated(mesh))
  batch = sharding.put_batch(batch_of(kind, rows), mesh)
  step = make_train_step(task, optimizer, lambda step: 0.1, num_micro)
  outputs = sharding.replicated(mesh)
  compiled = jax.jit(step, out_shardings=outputs).lower(state, {}, batch, {})
  compiled = compiled.compile()
  state, _ = compiled(state, {}, batch, {})
  return np.asarray(state.params['Dense_0']['kernel']), compiled.as_text()


@pytest.mark.slow
@pytest.mark.parametrize('kind', [Softmax, Sigmoid])
def test_micro_batches_and_devices_change_nothing(kind):
  kernel, _ = step_of(kind, 0.5, 1, 1)
  assert np.abs(kernel - step_of(kind, 0.0, 1, 1)[0]).max() > 1e-3
  for devices, num_micro in ((1, 4), (8, 2), (2, 8)):
    other, _ = step_of(kind, 0.5, devices, num_micro)
    np.testing.assert_allclose(other, kernel, rtol=1e-5, atol=1e-6)


COLLECTIVES = r'(all-gather|all-to-all|collective-permute|reduce-scatter)[-(]'


@pytest.mark.parametrize('num_micro', [1, 2])
def test_pairs_need_no_communication(num_micro):
  texts = [step_of(Softmax, alpha, 8, num_micro)[1] for alpha in (0.0, 0.5)]
  sums = [len(re.findall(r' all-reduce\(', text)) for text in texts]
  assert sums[0] == sums[1] > 0
  assert not re.search(COLLECTIVES, texts[1])
  # Two halves of the batch, which are on other devices, would need some.
  mesh = sharding.make_mesh({'data': 8})
  rows = sharding.put_batch({'x': np.zeros((16, 4))}, mesh)['x']
  rolled = jax.jit(lambda x: jnp.roll(x, 8, 0), out_shardings=rows.sharding)
  assert re.search(COLLECTIVES, rolled.lower(rows).compile().as_text())


def test_accuracy_of_five_and_of_each_class_by_hand():
  info = DatasetInfo('image', (2, 2, 3), 'uint8', 7, (), 99)
  task = Softmax({'loss': {'label_smoothing': 0.0}}, info)
  # Class 6 is best, then 5, ...; the last row is padding.
  logits = jnp.tile(jnp.arange(7.0), (6, 1))
  label, mask = jnp.array([6, 6, 2, 1, 5, 0]), jnp.array([1, 1, 1, 1, 1, 0])
  found = task.by_class(logits, {'label': label, 'mask': mask})
  assert found['top5_accuracy'].compute() == pytest.approx(4 / 5)
  classes = found['class_accuracy']
  assert classes.compute() == pytest.approx(1 / 4)  # of 1, 2, 5, 6
  assert np.isnan(classes.means()[0])
  assert classes.means()[1:] == pytest.approx([0, 0, np.nan, np.nan, 0, 1],
                                              nan_ok=True)  # fmt: skip
  both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), classes).reduce()
  assert both.compute() == pytest.approx(1 / 4)
