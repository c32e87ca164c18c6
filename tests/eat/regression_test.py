"""Numbers of any mean and spread are learned as standardised ones are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eat.policy import read_options
from eat.task import FineTune
from halting.row_rules import Tolerance
from model_lib.bert import BertClassifier
from tests import losses
from tests.eat import small
from tests.eat.task_test import config
from train_lib import config_schema, optimizers
from train_lib.sharding import unbox
from train_lib.text_classification import TextClassification

MEAN, SPREAD, STEPS = 40.0, 25.0, 4
OPTIMIZER = dataclasses.asdict(config_schema.Optimizer(
  lr=0.01, weight_decay=0.1, clip_norm=0.0, warmup_steps=0.0, eps=1e-12
))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Wider(Tolerance):
  """A rule with a default of its own."""

  tolerance: float = 0.5


def trained(mean, spread):
  """Outputs of all heads, loss and metrics after some steps."""
  info = dataclasses.replace(small.info(1), label_scale=(mean, spread))
  given = config(self_distill_weight=0.3, exit_weights=(0.3, 1.0))
  given['model'] |= dict(
    depth=2, exit_layers=(1,), prune_layers=(), prune_ratios=()
  )
  task = FineTune(given, info)
  batch = small.labelled(small.batch(small.rows(8), 20), 1, 6)
  batch['label'] = mean + spread * jnp.linspace(-1.5, 1.5, 8)
  params = unbox(jax.jit(task.init)(jax.random.key(0))[0])
  rate = optimizers.build_schedule(OPTIMIZER, 2 * STEPS)
  given = OPTIMIZER, rate, task.DECAY, task.scales
  optimizer = optimizers.build_optimizer(*given)
  state = optimizer.init(params)
  knobs = {'self_distill_weight': 0.3}

  @jax.jit
  def step(params, state):
    both = jax.value_and_grad(losses.of(task), has_aux=True)
    (loss, metrics), slopes = both(params, batch, knobs)
    updates, state = optimizer.update(slopes, state, params)
    exits = task.apply(params, {}, batch)[1]['exits']
    return optax.apply_updates(params, updates), state, (exits, loss, metrics)

  for _ in range(STEPS):
    params, state, (exits, loss, metrics) = step(params, state)
  values = {name: metric.compute() for name, metric in metrics.items()}
  return np.asarray(exits, np.float64), float(loss), values


def test_training_is_that_of_standardised_labels():
  exits, loss, metrics = trained(0.0, 1.0)
  scaled, scaled_loss, scaled_metrics = trained(MEAN, SPREAD)
  np.testing.assert_allclose((scaled - MEAN) / SPREAD, exits, atol=1e-4)
  assert scaled_loss == pytest.approx(loss, rel=1e-4)
  error = metrics['squared_error']
  assert scaled_metrics['squared_error'] == pytest.approx(
    SPREAD**2 * error, rel=1e-4
  )
  assert scaled_metrics['explained'] == pytest.approx(1 - error, abs=1e-4)
  assert 'explained' not in metrics
  # It has learned something: the first outputs were near the mean.
  assert error < 0.8 * np.square(np.linspace(-1.5, 1.5, 8)[:6]).mean()


def test_rows_leave_by_a_tolerance_in_the_unit_of_labels():
  given = {'patience': 3}
  assert read_options({}, {}, 0, SPREAD)[1] == Tolerance(0.1 * SPREAD)
  assert read_options(given, {}, 0)[1] == Tolerance(0.1, patience=3)
  assert read_options({'tolerance': 2.0}, {}, 0, SPREAD)[1] == Tolerance(2.0)
  given = {'rule': f'{__name__}:Wider'}
  assert read_options(given, {}, 0, SPREAD)[1] == Wider(0.5 * SPREAD)


def test_classes_are_not_scaled():
  model = BertClassifier(
    num_classes=3, width=8, depth=1, mlp_dim=8, num_heads=2, vocab_size=50
  )
  task = small.task(TextClassification, model, small.info(3))
  assert task.scales == ()
