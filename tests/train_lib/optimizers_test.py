"""Schedules, optimizers, phases and knobs against values by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from adatape.model import AdaTapeViT
from core import fields
from core.errors import ConfigError
from model_lib.bert import BertClassifier
from train_lib import config_schema, optimizers
from train_lib.phases import Phase, knob_value, plan
from train_lib.task import Task
from train_lib.text_classification import TextClassification


def config(**fields):
  defaults = dict(lr=1.0, warmup_steps=10.0, clip_norm=0.0)
  return dataclasses.asdict(config_schema.Optimizer(**defaults | fields))


def rates(steps, **fields):
  schedule = optimizers.build_schedule(config(**fields), total_steps=110)
  return [float(schedule(step)) for step in steps]


@pytest.mark.parametrize(
  ('fields', 'expected'),
  [
    (dict(), {0: 0.1, 5: 0.55, 10: 1.0, 60: 0.5, 110: 0.0}),
    (dict(schedule='linear'), {0: 0.1, 60: 0.5, 110: 0.0}),
    (dict(schedule='constant'), {0: 0.1, 60: 1.0, 110: 1.0}),
    (dict(schedule='rsqrt'), {0: 0.1, 10: 1.0, 40: 0.5}),
    (dict(schedule='rsqrt', warmup_steps=0.0), {0: 1.0, 3: 0.5}),
    (dict(warmup_steps=0.1), {11: 1.0}),
  ],
)
def test_schedules_by_hand(fields, expected):
  values = rates(expected, **fields)
  assert values == pytest.approx(list(expected.values()), abs=1e-6)


SIZE = dict(num_classes=3, width=8, mlp_dim=8, num_heads=2)
VIT = SIZE | dict(depth=2, patch_size=8, query_dim=4)
IMAGE, WORDS = jnp.zeros((1, 16, 16, 3)), jnp.zeros((1, 4), jnp.int32)
SPARED = {'tokens/positions/embedding', 'tokens/cls'}


@pytest.mark.parametrize(
  ('model', 'inputs', 'others'),
  [
    (AdaTapeViT(bank='learnable', bank_size=60, **VIT), (IMAGE,),
     SPARED | {'tape_bank/tokens'}),
    (AdaTapeViT(bank='input', bank_patch_size=2, **VIT), (IMAGE,),
     SPARED | {'tape_bank/positions/embedding'}),
    (BertClassifier(**SIZE, depth=1, vocab_size=9),
     (WORDS, WORDS, jnp.full(1, 4)), set()),
  ],
)  # fmt: skip
def test_decay_spares_biases_norms_and_what_no_kernel_has(
  model, inputs, others
):
  shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)
  mask = optimizers.trainable_mask(shapes['params'], TextClassification.DECAY)
  decayed = {
    optimizers.path_name(path): on
    for path, on in jax.tree_util.tree_leaves_with_path(mask)
  }
  spared = {name for name in decayed if name.endswith(('/bias', '/scale'))}
  assert {name for name, on in decayed.items() if not on} == spared | others


def constant(**fields):
  """An optimizer whose learning rate is the same in every step."""
  fields = config(schedule='constant', warmup_steps=0.0, **fields)
  schedule = optimizers.build_schedule(fields, 10)
  return optimizers.build_optimizer(fields, schedule, Task.DECAY)


def update(gradient, weights=(3.0, 4.0), parameter='kernel', **fields):
  """The first update of one parameter."""
  optimizer = constant(**fields)
  params = {parameter: jnp.asarray(weights)}
  updates, _ = optimizer.update(
    {parameter: jnp.asarray(gradient)}, optimizer.init(params), params
  )
  return np.asarray(updates[parameter])


SGD = dict(name='sgd', b1=0.0, lr=0.5, clip_norm=1.0, weight_decay=0.1)


@pytest.mark.parametrize(
  ('gradient', 'fields', 'expected', 'rtol'),
  [
    # Clipped to norm 1: (.6, .8); decay adds .1 * (3, 4); times -.5.
    ([6.0, 8.0], SGD, [-0.45, -0.6], 1e-6),
    # Adam's first update has the size of the learning rate.
    ([6.0, -8.0], dict(name='adam', lr=0.1), [-0.1, 0.1], 1e-4),
    # atan(.1) / .1 = .997; decay subtracts lr * .5 * (3, 4).
    (
      [6.0, -8.0],
      dict(name='adam_atan2', lr=0.1, b2=0.95, weight_decay=0.5),
      [-0.0996687 - 0.15, 0.0996687 - 0.2],
      1e-6,
    ),
    # LAMB: the direction is (1, 1), its norm sqrt(2); weights have norm 5.
    ([1.0, 1.0], dict(name='lamb', lr=0.1), [-0.5 / 2**0.5] * 2, 1e-4),
  ],
)
def test_updates_by_hand(gradient, fields, expected, rtol):
  np.testing.assert_allclose(update(gradient, **fields), expected, rtol=rtol)


@pytest.mark.parametrize('parameter', ['bias', 'scale', 'cls', 'embedding'])
def test_lamb_does_not_scale_what_is_not_decayed(parameter):
  # With a trust ratio the update would be lr * |bias|: it never changes sign.
  value = update([1.0], [0.01], parameter, name='lamb', lr=0.1)
  np.testing.assert_allclose(value, [-0.1], rtol=1e-4)


def twenty_steps(build, rates):
  """Parameters after 20 steps of `build(rates)`, and its program."""
  params = {'kernel': jnp.ones((2, 3)), 'bias': jnp.ones(3)}

  @jax.jit
  def step(params, state, rates):
    gradients = jax.tree.map(jnp.sin, params)
    updates, state = build(rates).update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  state = build({}).init(params)
  text = step.lower(params, state, rates).as_text()
  for _ in range(20):
    params, state = step(params, state, rates)
  return params, text


def with_rates(lr, end_lr, weight_decay, **fields):
  fields = config(
    lr=lr, end_lr=end_lr, weight_decay=weight_decay, warmup_steps=5.0,
    **fields | dict(clip_norm=1.0),
  )  # fmt: skip

  def build(rates):
    now = {**fields, **rates}
    schedule = optimizers.build_schedule(now, 20)
    return optimizers.build_optimizer(now, schedule, Task.DECAY)

  return twenty_steps(build, optimizers.rates(fields))


@pytest.mark.parametrize(
  ('name', 'schedule'),
  [
    ('adamw', 'cosine'), ('lamb', 'linear'), ('adafactor', 'rsqrt'),
    ('adam_atan2', 'constant'),
  ],
)  # fmt: skip
def test_runs_of_other_rates_share_a_program(name, schedule):
  how = dict(name=name, schedule=schedule, scales=('bias->3',))
  (one, text), (other, same) = (
    with_rates(*rates, **how) for rates in ((0.3, 0.03, 0.1), (0.2, 0.01, 0.2))
  )
  assert text == same
  assert not np.allclose(one['kernel'], other['kernel'])


def test_rates_as_arguments_equal_optax():
  found, _ = with_rates(0.3, 0.03, 0.1)
  schedule = optax.warmup_cosine_decay_schedule(0.3 / 5, 0.3, 5, 20, 0.03)
  mask = {'kernel': True, 'bias': False}
  reference = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(schedule, weight_decay=0.1, mask=mask),
  )
  expected, _ = twenty_steps(lambda _: reference, {})
  for name in mask:
    np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)


def test_adam_atan2_is_its_formula():
  """That of imoneoi/adam-atan2, in float64; without a gradient no update."""
  gradients = np.random.default_rng(0).normal(size=(5, 3)) * [1.0, 1e-9, 0.0]
  m, v = np.zeros(3), np.zeros(3)
  with jax.enable_x64(True):
    optimizer = optimizers.scale_by_adam_atan2(0.9, 0.95)
    state = optimizer.init(jnp.zeros(3, jnp.float64))
    for t, gradient in enumerate(gradients, 1):
      updates, state = optimizer.update(jnp.asarray(gradient), state)
      m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
      angle = np.arctan2(m, np.sqrt(v) / np.sqrt(1 - 0.95**t))
      assert updates.dtype == np.float64
      np.testing.assert_allclose(updates, angle / (1 - 0.9**t), rtol=1e-12)


METHODS = 'adamw', 'adam', 'adam_atan2', 'sgd', 'lamb', 'adafactor'


@pytest.mark.parametrize('name', METHODS)
def test_every_optimizer_goes_downhill(name):
  gradient = np.random.default_rng(0).normal(size=(4, 4))
  updates = update(gradient, np.full((4, 4), 2.0), name=name, weight_decay=0.0)
  np.testing.assert_array_equal(np.sign(updates), -np.sign(gradient))


def test_scales_multiply_the_rates_of_the_parameters_they_name():
  scales = ('^exit_2/->10', 'kernel->0.5')
  optimizer = constant(name='sgd', b1=0.0, lr=0.1, scales=scales)
  paths = {'exit_2': {'kernel': 10.0, 'bias': 10.0}, 'head': {'kernel': 0.5,
           'bias': 1.0}}  # fmt: skip
  params = jax.tree.map(jnp.ones_like, jax.tree.map(jnp.asarray, paths))
  updates, _ = optimizer.update(params, optimizer.init(params), params)
  jax.tree.map(
    lambda by, got: np.testing.assert_allclose(got, -0.1 * by, rtol=1e-6),
    paths, updates,
  )  # fmt: skip


def test_a_scale_that_names_no_parameter_is_refused():
  params = {'head': {'kernel': jnp.ones(2)}}
  optimizers.check_patterns((), ('^head/->2',), params)
  with pytest.raises(ConfigError, match=r"optimizer\.scales: .*'\^exit_'"):
    optimizers.check_patterns((), ('^exit_->2',), params)


def check(**given):
  return Phase(**fields.check(Phase, given, 'phases.0'))


def test_phases_follow_each_other():
  first, second, third = phases = plan([
    check(steps=10, knobs={'prune': 0.0}),
    check(name='b', steps=5, knobs={'prune': ('linear', 0, 0.4)}),
    check(epochs=1.5),
  ], 10)  # fmt: skip
  assert [(p.label, p.index, p.start, p.stop) for p in phases] == [
    ('phase 0', 0, 0, 10), ('b', 1, 10, 15), ('phase 2', 2, 15, 30),
  ]  # fmt: skip
  values = [float(second.knob_values(step)['prune']) for step in (10, 12, 14)]
  assert values == pytest.approx([0.0, 0.2, 0.4])
  assert float(first.knob_values(9)['prune']) == 0.0
  assert third.knob_values(20) == {}


@pytest.mark.parametrize(
  ('schedule', 'expected'),
  [
    (0.3, [0.3, 0.3, 0.3]),
    (['linear', 1, 0.0], [1.0, 0.5, 0.0]),
    (('cosine', 0.0, 1.0), [0.0, 0.5, 1.0]),
    (('alternate', 0.0, 0.7), [0.0, 0.7, 0.0]),
  ],
)
def test_schedules(schedule, expected):
  schedule = check(knobs={'tau': schedule}).knobs['tau']
  values = [knob_value(schedule, step, 2) for step in range(3)]
  assert values == pytest.approx(expected)
