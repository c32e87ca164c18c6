"""The joint loss of EAT against NumPy; distillation; teachers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, rel_entr, softmax

from core.errors import ConfigError
from dataset_lib.source import DatasetInfo
from eat.task import FineTune
from tests import losses
from tests.eat import small
from tests.eat.small import info
from tests.train_lib import mixup_test
from train_lib.classification import Classification

WEIGHTS = (0.2, 0.3, 1.0)


def config(**loss):
  model = {k: v for k, v in small.FIELDS.items() if k != 'num_classes'}
  return {
    'dtype': 'float32',
    'model': {'name': 'eat.model:EatClassifier', **model},
    'loss': dict(
      label_smoothing=0.0, exit_weights=WEIGHTS, temperature=2.0, teacher='',
      distill_weight=0.5, self_distill_weight=0.0, self_distill_from='last',
    ) | loss,
  }  # fmt: skip


def case(num_classes=3, **loss):
  """(task, batch with two rows of padding, parameters)."""
  batch = small.labelled(small.batch(small.rows(8), 20), num_classes, 6)
  params = small.build(num_classes=num_classes)[1]['params']
  return FineTune(config(**loss), info(num_classes)), batch, params


def logits_of(task, params, batch):
  """Those of all heads `[E, B, O]` in float64."""
  _, out = jax.jit(lambda p, b: task.apply(p, {}, b))(params, batch)
  return np.asarray(out['exits'], np.float64)


def test_joint_loss_is_the_weighted_sum_over_heads():
  task, batch, params = case(label_smoothing=0.1)
  loss, metrics = losses.of(task)(params, batch)
  exits, label = logits_of(task, params, batch), np.asarray(batch['label'])
  rows = -(log_softmax(exits, -1) * (0.9 * np.eye(3)[label] + 0.1 / 3)).sum(-1)
  expected = np.array(WEIGHTS) @ rows[:, :6].mean(1)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  correct = (exits[0].argmax(-1) == label)[:6].mean()
  np.testing.assert_allclose(metrics['accuracy_exit_1'].compute(), correct)
  # Padding rows change nothing.
  other = batch | {'tokens': batch['tokens'].at[6:].set(7)}
  np.testing.assert_array_equal(losses.of(task)(params, other)[0], loss)


class Exits(nn.Module):
  """Three heads that are linear maps of the pixels."""

  num_classes: int = 3

  @nn.compact
  def __call__(self, images, row_keys=None):
    exits = nn.Dense(9)(images.reshape(len(images), -1))
    exits = exits.reshape(-1, 3, 3).swapaxes(0, 1)
    return exits[-1], {'exits': exits}


class OfImages(FineTune):
  """The loss of EAT for images, which can be mixed."""

  arguments, example = Classification.arguments, Classification.example
  head_layers = (1, 2, 3)

  def build_model(self):
    return Exits()


def test_mixup_reaches_every_exit():
  losses = config(label_smoothing=0.1, self_distill_weight=0.5)
  task = OfImages(losses, DatasetInfo('image', (2, 2, 3), 'uint8', 3, (), 9))
  batch = jax.tree.map(jnp.asarray, mixup_test.batch_of())
  batch['label'] %= 3
  mixup_test.assert_mixes(task, jax.jit(task.init)(jax.random.key(0))[0], batch)


def test_regression_is_a_squared_error():
  task, batch, params = case(1)
  loss, metrics = losses.of(task)(params, batch)
  errors = logits_of(task, params, batch)[..., 0] - np.asarray(batch['label'])
  expected = np.array(WEIGHTS) @ np.square(errors)[:, :6].mean(1)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert 'accuracy' not in metrics


@pytest.mark.parametrize(
  'later', ['later', pytest.param('last', marks=pytest.mark.nightly)]
)
def test_exits_learn_from_later_heads(later):
  changes = dict(exit_weights=(0.0, 0.0, 0.0), self_distill_from=later)
  task, batch, params = case(**changes)
  knobs = {'self_distill_weight': 0.7, 'exit_scale': 0.5}
  first, second, last = softmax(logits_of(task, params, batch) / 2.0, -1)
  rows = rel_entr(last, first)
  if later == 'later':
    rows = (rel_entr(second, first) + rows) / 2
  rows = (rows + rel_entr(last, second)).sum(-1)

  def loss(params):
    return losses.of(task)(params, batch, knobs)[0]

  value, slopes = jax.value_and_grad(loss)(params)
  np.testing.assert_allclose(value, 1.4 * rows[:6].mean(), rtol=1e-4)
  # The target is not pulled to the exits.
  assert np.abs(slopes['head']['kernel']).max() == 0
  assert np.abs(slopes['exit_1']['head']['kernel']).max() > 0


def test_every_other_step_may_train_the_last_head_alone():
  task, batch, params = case()
  loss, metrics = losses.of(task)(params, batch, {'exit_scale': 0.0})
  last = metrics['cross_entropy'].compute()
  np.testing.assert_allclose(loss, WEIGHTS[-1] * last, rtol=1e-6)


SHARES = {  # row: block; column: heads after blocks 0, 2 and 3
  'sweet': [[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]],
  'equilibrium': [[1 / 3] * 3, [0, 1 / 2, 1 / 2], [0, 1 / 2, 1 / 2], [0, 0, 1]],
}


@pytest.mark.parametrize(
  'exit_mean', [False, pytest.param(True, marks=pytest.mark.nightly)]
)
def test_what_the_gradients_of_heads_do_to_the_layers_below(exit_mean):
  task, batch, params = case()
  keys = jax.random.split(jax.random.key(0), 8)

  def gradients(kind):
    """Of each head's squared logits, for a kernel of each block."""
    task.model = task.model.clone(gradient=kind, exit_mean=exit_mean)

    def losses(params):
      exits = task.apply(params, {}, batch, keys)[1]['exits']
      return (exits**2).sum((1, 2))

    found = jax.jit(jax.jacrev(losses))(params)
    return [found[f'block_{n}']['mlp']['out']['kernel'] for n in range(4)]

  plain = gradients('joint')
  for kind, shares in SHARES.items():
    for got, full, share in zip(gradients(kind), plain, shares, strict=True):
      expected = np.asarray(share)[:, None, None] * full
      assert np.abs(expected).max() > 0.1
      atol = 1e-5 * np.abs(full).max()
      np.testing.assert_allclose(got, expected, rtol=1e-5, atol=atol)


def test_illegal_fields_are_named():
  for part, field, value in (
    ('loss', 'exit_weights', (0.3, 1.0)), ('model', 'exit_layers', (9,)),
  ):  # fmt: skip
    wrong = config()
    wrong[part][field] = value
    with pytest.raises(ConfigError, match=rf'{part}\.{field}: expected'):
      FineTune.validate_config(wrong)
