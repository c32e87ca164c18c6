"""Fine-tuning of ALBERT with halting: loss, metrics, fields, warm start."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, rel_entr

from albert_act import published
from albert_act.task import FineTune
from core import files
from core.errors import ConfigError
from dataset_lib import tokenizer
from eval_lib.metrics import compute
from model_lib import convert
from tests import losses
from tests.albert_act import small, tiny_run
from tests.eat.small import info, labelled
from train_lib import config_schema
from train_lib.build import Setup
from train_lib.warm_start import start_from

TAU = 0.25


def config(**model):
  name = {'name': 'albert_act.model:AlbertClassifier'}
  return {
    'dtype': 'float32',
    'model': name | small.FIELDS | model,
    'loss': dict(label_smoothing=0.0, ponder_weight=TAU, prior_rate=0.3),
  }


def a_batch(num_classes=3):
  """Five rows, of which the last two are padding."""
  return labelled(small.batch((9, 5, 7, 1, 4)), num_classes, 3)


@functools.cache
def build(num_classes=3, **model):
  """(task, its jitted loss)."""
  task = FineTune(config(**model), info(num_classes, vocab_size=40))
  return task, losses.of(task)


def by_loop(batch, num_classes=3, **changes):
  """(logits, iterations, ponder cost) of the real rows, by a plain loop."""
  model, variables = small.build(num_classes=num_classes, **changes)
  logits, steps, costs = [], [], []
  for row in range(3):
    length = int(batch['length'][row])
    state, n, rest, _ = small.encode_by_loop(
      variables['params'], np.asarray(batch['tokens'][row, :length]),
      np.asarray(batch['token_types'][row, :length]), model,
    )  # fmt: skip
    logits.append(small.classify_by_loop(variables['params'], state))
    steps.append(n)
    costs.append((n + rest).sum())
  return variables['params'], np.stack(logits), steps, np.array(costs)


def test_the_ponder_weight_adds_tau_times_the_mean_cost_of_a_row():
  batch = a_batch()
  params, logits, _, costs = by_loop(batch)
  _, run = build()
  loss, metrics = run(params, batch, {})
  label = np.asarray(batch['label'])[:3]
  entropy = -log_softmax(logits, -1)[np.arange(3), label].mean()
  assert loss == pytest.approx(entropy + TAU * costs.mean(), rel=1e-5)
  values = compute(metrics)
  assert values['cross_entropy'] == pytest.approx(entropy, rel=1e-5)
  assert values['ponder_cost'] == pytest.approx(costs.mean(), rel=1e-5)
  # Padding rows change nothing.
  padded = batch | {'tokens': batch['tokens'].at[3:].set(7)}
  assert run(params, padded, {})[0] == loss
  # A knob overrides the configuration.
  for tau in (0.0, 2.0):
    other, _ = run(params, batch, {'ponder_weight': jnp.float32(tau)})
    assert other == pytest.approx(entropy + tau * costs.mean(), rel=1e-5)


def test_the_loss_of_ponder_net_is_expected_over_its_steps():
  changes = dict(rule=small.PONDER)
  model, variables = small.build(**changes)
  params, batch = variables['params'], a_batch()
  want, steps, distances = [], [], []
  for row in range(3):
    length = int(batch['length'][row])
    _, n, p, history = small.ponder_net_by_loop(
      params, np.asarray(batch['tokens'][row, :length]),
      np.asarray(batch['token_types'][row, :length]), model,
    )  # fmt: skip
    logits = [small.classify_by_loop(params, state) for state in history[1:]]
    entropy = -log_softmax(np.stack(logits), -1)[:, batch['label'][row]]
    prior = 0.7 ** np.arange(6)
    distances.append(rel_entr(p, prior / prior.sum()).sum())
    want.append(p @ entropy)
    steps.append(n)
  task, run = build(**changes)
  build(dynamic=True)[0].check_training()
  with pytest.raises(ConfigError, match=r'model\.dynamic: .*every step'):
    build(**changes, dynamic=True)[0].check_training()
  loss, metrics = run(params, batch, {})
  expected = np.mean(want) + TAU * np.mean(distances)
  assert loss == pytest.approx(expected, rel=1e-5)
  values = compute(metrics)
  assert values['depth'] == np.mean(steps)
  assert len(set(steps)) > 1
  assert values['divergence'] == pytest.approx(np.mean(distances), rel=1e-5)
  # What is evaluated are the answers at the quantile.
  task, _ = build(**changes)
  logits, out = jax.jit(task.apply)(params, {}, batch)
  at_quantile = out['step_logits'][np.array(steps) - 1, np.arange(3)]
  np.testing.assert_allclose(logits[:3], at_quantile, atol=1e-5)
  found = jax.jit(task.outputs)(params, {}, batch)['logits']
  np.testing.assert_array_equal(found, logits[:, None])
  free, _ = run(params, batch, {'ponder_weight': jnp.float32(0.0)})
  assert free == pytest.approx(np.mean(want), rel=1e-5)


def test_metrics_of_depth_are_of_real_tokens_and_rows():
  batch = a_batch()
  params, _, steps, costs = by_loop(batch)
  task, _ = build()
  values = compute(jax.jit(task.evaluate)(params, {}, batch))
  flat = np.concatenate(steps)
  assert len(set(flat.tolist())) > 2
  assert values['iterations'] == pytest.approx(flat.mean(), rel=1e-6)
  assert values['depth'] == pytest.approx(np.mean([n.max() for n in steps]))
  assert values['ponder_cost'] == pytest.approx(costs.mean(), rel=1e-5)
  assert 'accuracy' in values


def test_a_regression_is_a_squared_error_and_its_ponder_cost():
  batch = a_batch(1)
  params, logits, _, costs = by_loop(batch, num_classes=1)
  loss, metrics = build(1)[1](params, batch, {})
  squares = np.square(logits[:, 0] - np.asarray(batch['label'])[:3]).mean()
  assert loss == pytest.approx(squares + TAU * costs.mean(), rel=1e-5)
  values = compute(metrics)
  assert values['squared_error'] == pytest.approx(squares, rel=1e-5)
  assert 'accuracy' not in values


def resolved(start, **model):
  """The model of a run whose sizes are those of a checkpoint."""
  name = 'albert_act.model:AlbertClassifier'
  model = {'name': name, 'from_checkpoint': str(start)} | model
  given = config() | {'model': model}
  FineTune.validate_config(given)
  return given['model']


def test_sizes_are_those_of_the_checkpoint(tmp_path):
  run = published.SIZES.defaults | {'max_iterations': 4, 'vocab_size': 99}
  files.write_json(tmp_path / 'config.json', {'model': run | {'dropout': 0.3}})
  found = resolved(tmp_path)
  assert {name: found[name] for name in run} == run
  assert found['dropout'] != 0.3
  assert 'from_checkpoint' not in found
  assert resolved(tmp_path, mlp_dim=7)['mlp_dim'] == 7


@pytest.mark.parametrize(
  'text',
  ['{}', '{"model": null}', '{"model": ["a"]}', '[]', '{', 'NaN', None,
   '{"model_type": "bert"}', '{"model": {"depth": 3}}'],
)  # fmt: skip
def test_a_directory_without_such_a_model_is_refused(tmp_path, text):
  if text is not None:
    (tmp_path / 'config.json').write_text(text)
  with pytest.raises(ConfigError) as error:
    resolved(tmp_path)
  assert error.value.field == 'model.from_checkpoint'
  assert 'the directory of a run or of a publ' in error.value.expected


def begun(config):
  """Returns the parameters at step 0 by top-level module."""
  config = config_schema.validate(config)
  built = Setup(config)
  with jax.set_mesh(built.mesh):
    state = start_from(built)
    return jax.device_get(state.params)


def load(tmp_path_factory, name, start, **arguments):
  """The configuration of this name that begins from `start`."""
  if name == 'glue':
    data = tiny_run.texts(tmp_path_factory)
    return tiny_run.load(
      'glue', ['dataset.max_length=32'], task='sst2', data=data, batch=8,
      checkpoint=start, **arguments,
    )  # fmt: skip
  sizes = convert.read_sizes(start)
  overrides = [f'model.{name}={size}' for name, size in sizes.items()]
  overrides.append(f'warm_start.workdir={start}')
  if arguments['halting'] == 'act':
    overrides.append('warm_start.skip=^score/')
  return tiny_run.load(
    'pretrain', overrides, corpus=tiny_run.corpus(tmp_path_factory),
    variant='micro', length=tiny_run.LENGTH, batch=8, **arguments,
  )  # fmt: skip


def case(start, name, fresh, mark, **arguments):
  return pytest.param(start, name, set(fresh), arguments, marks=mark)


SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly


@pytest.mark.parametrize(
  ('start', 'name', 'fresh', 'arguments'),
  [
    case('pretraining', 'glue', ['head'], SLOW),
    case('pretraining', 'glue', ['head', 'score'], NIGHTLY, score='fresh'),
    case('pretraining', 'glue', ['head'], NIGHTLY, halting='fixed'),
    case('hugging_face', 'glue', ['head', 'score'], NIGHTLY, score='fresh'),
    case('hugging_face', 'glue', ['head'], NIGHTLY, halting='fixed'),
    case('hugging_face', 'pretrain', ['score'], NIGHTLY, halting='act'),
    case('hugging_face', 'pretrain', [], NIGHTLY, halting='fixed'),
  ],
)
def test_parameters_are_those_of_the_start_but_for_the_fresh_ones(
  start, name, fresh, arguments, tmp_path_factory
):
  if start == 'hugging_face':
    path = tiny_run.hugging_face(tmp_path_factory)
    source = convert.load(path, *['pretraining'] * (name == 'pretrain')).params
  else:
    path = tiny_run.made(tmp_path_factory, 'pretrain')
    source = tiny_run.parameters(tiny_run.AlbertPretraining)
  config = load(tmp_path_factory, name, path, **arguments)
  # The words of `glue` are those of the start.
  assert config.model.vocab_size == tiny_run.SIZES['vocab_size']
  if name == 'glue':
    given = tokenizer.load(config.dataset.tokenizer)
    assert given.vocab_size == tiny_run.SIZES['vocab_size']
  params = begun(config)
  assert ('score' in params) == (arguments.get('halting') != 'fixed')
  assert set(params) - set(source) <= fresh <= set(params)
  for key in set(params) - fresh:
    jax.tree.map(np.testing.assert_array_equal, params[key], source[key])
  for key in fresh & set(source):
    theirs = jax.tree.leaves(source[key])
    for ours, other in zip(jax.tree.leaves(params[key]), theirs, strict=True):
      assert not np.array_equal(ours, other)
  if name == 'glue' and 'score' in fresh:
    assert params['score']['bias'] == pytest.approx(-2.0)


@pytest.mark.slow
def test_a_score_that_hugging_face_lacks_is_named(tmp_path_factory):
  start = tiny_run.hugging_face(tmp_path_factory)
  config = load(tmp_path_factory, 'glue', start)
  with pytest.raises(ConfigError, match='score/kernel') as error:
    begun(config)
  assert error.value.field == 'warm_start.workdir'
