"""The joint loss of EAT against NumPy; distillation; a run from end to end."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from scipy.special import log_softmax

from configs.eat import glue
from dataset_lib import tokenizer
from dataset_lib.errors import ConfigError
from eat.model import EatClassifier
from eat.task import FineTune, check_tokenizer
from tests.eat import small
from tests.eat.small import info
from train_lib import loading, strict_json

WEIGHTS = (0.2, 0.3, 1.0)


def config(**loss):
  model = {k: v for k, v in small.FIELDS.items() if k != 'num_classes'}
  return {
    'dtype': 'float32',
    'model': {'name': 'eat.model:EatClassifier', **model},
    'loss': dict(
      label_smoothing=0.0, exit_weights=WEIGHTS, temperature=2.0, teacher='',
      distill_weight=0.5, self_distill_weight=0.0,
    ) | loss,
  }  # fmt: skip


def a_batch(num_classes=3, rows=8):
  tokens, types, lengths = small.batch(small.rows(rows), 20)
  rng = np.random.default_rng(0)
  label = rng.integers(0, max(num_classes, 2), rows)
  return {
    'tokens': tokens,
    'token_types': types,
    'length': lengths,
    'label': jnp.asarray(label, 'int32' if num_classes > 1 else 'float32'),
    'mask': jnp.asarray([1.0] * (rows - 2) + [0.0] * 2, jnp.float32),
    'index': jnp.arange(rows, dtype=jnp.int32),
  }


def loss_of(task, params, batch, knobs=None, frozen=None):
  def loss(params, batch, knobs, frozen):
    norm = task.normalizers(batch)
    return task.loss(params, {}, frozen, batch, norm, None, knobs)

  return jax.jit(loss)(params, batch, knobs or {}, frozen or {})


def out_of(task, params, batch):
  return jax.jit(lambda p, b: task.apply(p, {}, b))(params, batch)


def params_of(num_classes=3):
  return small.build(num_classes=num_classes)[1]['params']


def test_joint_loss_is_the_weighted_sum_over_heads():
  task = FineTune(config(), info())
  batch, params = a_batch(), params_of()
  loss, (metrics, _) = loss_of(task, params, batch)
  _, out = out_of(task, params, batch)
  exits = np.asarray(out['exits'], np.float64)
  label = np.asarray(batch['label'])
  expected = 0.0
  for weight, logits in zip(WEIGHTS, exits, strict=True):
    rows = -log_softmax(logits, -1)[np.arange(8), label]
    expected += weight * rows[:6].mean()
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  correct = (exits[0].argmax(-1) == label)[:6].mean()
  np.testing.assert_allclose(metrics['accuracy_exit_1'].compute(), correct)
  # Padding rows change nothing.
  other = batch | {'tokens': batch['tokens'].at[6:].set(7)}
  np.testing.assert_array_equal(loss_of(task, params, other)[0], loss)


@pytest.mark.nightly
def test_self_distillation_pulls_exits_to_the_last_head():
  task = FineTune(config(exit_weights=(0.0, 0.0, 0.0)), info())
  batch, params = a_batch(), params_of()
  loss, _ = loss_of(task, params, batch, {'self_distill_weight': 0.7})
  _, out = out_of(task, params, batch)
  scaled = log_softmax(np.asarray(out['exits'], np.float64) / 2.0, -1)
  kl = (np.exp(scaled[-1]) * (scaled[-1] - scaled[:-1])).sum(-1).sum(0)
  np.testing.assert_allclose(loss, 0.7 * 4.0 * kl[:6].mean(), rtol=1e-4)
  grads = jax.grad(lambda p: loss_of(task, p, batch, {
    'self_distill_weight': 0.7})[0])(params)  # fmt: skip
  # The target is not pulled to the exits.
  assert np.abs(grads['head']['kernel']).max() == 0
  assert np.abs(grads['exit_1']['head']['kernel']).max() > 0


@pytest.mark.slow
def test_distillation_from_a_teacher():
  task = FineTune(config(exit_weights=(0.0, 0.0, 0.0)), info())
  task.teacher = FineTune(config(), info())
  batch, params = a_batch(), params_of()
  frozen = {'params': small.randomised({'params': params}, 1)['params'],
            'model_state': {}}  # fmt: skip
  loss, _ = loss_of(task, params, batch, frozen=frozen)
  target = log_softmax(
    np.asarray(out_of(task.teacher, frozen['params'], batch)[0]) / 2.0, -1
  )
  own = log_softmax(np.asarray(out_of(task, params, batch)[0]) / 2.0, -1)
  kl = (np.exp(target) * (target - own)).sum(-1)
  np.testing.assert_allclose(loss, 0.5 * 4.0 * kl[:6].mean(), rtol=1e-4)


def test_regression_is_a_squared_error():
  task = FineTune(config(), info(1))
  batch, params = a_batch(1), params_of(1)
  loss, (metrics, _) = loss_of(task, params, batch)
  _, out = out_of(task, params, batch)
  squares = np.square(
    np.asarray(out['exits'])[..., 0] - np.asarray(batch['label'])
  )
  expected = (np.array(WEIGHTS) * squares[:, :6].mean(1)).sum()
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert 'accuracy' not in metrics


@pytest.mark.nightly
def test_outputs_are_by_row():
  task = FineTune(config(), info())
  batch, params = a_batch(), params_of()
  outputs = task.outputs(params, {}, batch)
  assert outputs['logits'].shape == (8, 3, 3)
  assert outputs['kept'].shape == (8, 2)


def test_a_student_takes_every_second_layer():
  assert glue.every_second_layer(4) == (
    '^block_0/->block_0/', '^block_1/->dropped_1/',
    '^block_2/->block_1/', '^block_3/->dropped_3/',
  )  # fmt: skip


@pytest.mark.parametrize('depth', range(1, 26))
@pytest.mark.parametrize(('task', 'count'), [('sst2', 1), ('stsb', 2)])
def test_layers_are_placed_where_the_model_has_them(
  depth, task, count, tmp_path
):
  (tmp_path / 'config.json').write_text(f'{{"depth": {depth}}}')
  page = glue.get_config(f'task={task},pretrained={tmp_path}').model
  exits, prunes = page.exit_layers, page.prune_layers
  fields = small.FIELDS | dict(
    depth=depth, exit_layers=exits, prune_layers=prunes,
    prune_ratios=(0.3,) * len(prunes),
  )  # fmt: skip
  model = EatClassifier(**fields)
  # None at the last layer, which has a head anyway; one as soon as it fits.
  assert model.heads() == (*exits, depth)
  assert bool(exits) == bool(prunes) == (depth > 1)
  if depth > 4:
    assert exits == (3, 4)[2 - count :]
    assert prunes == (2, 4)


@pytest.mark.parametrize(
  ('part', 'field', 'value'),
  [
    ('loss', 'exit_weights', (0.3, 1.0)),
    ('model', 'exit_layers', (9,)),
    ('model', 'num_heads', 3),
  ],
)
def test_illegal_fields_are_named(part, field, value):
  wrong = config()
  wrong[part][field] = value
  with pytest.raises(ConfigError, match=rf'{part}\.{field}: expected'):
    FineTune.validate_config(wrong)


WORDS = ('[PAD]', '[UNK]', '[CLS]', '[SEP]', 'a', 'b', '##b')


def vocabulary(path, words=WORDS, **options):
  """A directory with a vocab.txt and its options."""
  path.mkdir()
  (path / 'vocab.txt').write_text('\n'.join(words))
  strict_json.write(path / 'tokenizer_config.json', options)
  return str(path)


def run_of(path, source):
  """The directory of a run that read its data with this tokenizer."""
  path.mkdir()
  groups = ('model', 'loss', 'dataset', 'warm_start')
  strict_json.write(path / 'config.json', {name: {} for name in groups})
  tokenizer.load(source).save(path / 'tokenizer.json')
  return str(path)


def test_a_teacher_reads_the_ids_that_it_learned(tmp_path):
  own = vocabulary(tmp_path / 'own')
  same = run_of(tmp_path / 'same', vocabulary(tmp_path / 'copy'))
  check_tokenizer(same, own)
  check_tokenizer(same, f'{same}/tokenizer.json')
  check_tokenizer(same, '')
  others = {
    'order': dict(words=(*WORDS[:4], 'b', 'a', '##b')),
    'longer': dict(words=(*WORDS, 'c')),
    'case': dict(do_lower_case=False),
  }
  for name, changes in others.items():
    other = run_of(
      tmp_path / name, vocabulary(tmp_path / f'{name}_own', **changes)
    )
    with pytest.raises(ConfigError, match=r'loss\.teacher: expected a run'):
      check_tokenizer(other, own)
  (tmp_path / 'case' / 'tokenizer.json').unlink()
  with pytest.raises(ConfigError, match=r'loss\.teacher.*no tokenizer'):
    check_tokenizer(str(tmp_path / 'case'), own)


def test_a_foreign_teacher_is_refused_before_training(tmp_path):
  other = vocabulary(tmp_path / 'other', (*WORDS[:4], 'b', 'a', '##b'))
  given = config(teacher=run_of(tmp_path / 'run', other))
  given |= {'dataset': {'tokenizer': vocabulary(tmp_path / 'own')}}
  # From the command line, and by whoever builds the task otherwise.
  resolved = ml_collections.ConfigDict(
    given | {'warm_start': {'workdir': ''}, 'evals': {}}
  )
  with pytest.raises(ConfigError, match=r'loss\.teacher'):
    FineTune.validate_config(resolved)
  with pytest.raises(ConfigError, match=r'loss\.teacher'):
    FineTune(given, info()).init_frozen()


@pytest.mark.parametrize(
  ('theirs', 'message'),
  [
    (info(2), 'expected a run with the 3 classes'),
    (
      dataclasses.replace(info(), class_names=('x', 'y', 'z')),
      'expected a run with the classes of the data set, a, b, c',
    ),
  ],
)
def test_a_teacher_has_the_classes_of_the_data(theirs, message, monkeypatch):
  given = config(teacher='there') | {'dataset': {}}
  monkeypatch.setattr(loading, 'load_config', lambda *_, **__: given)
  teacher = FineTune(config(), theirs)
  monkeypatch.setattr(loading, 'load_task', lambda *_: teacher)
  with pytest.raises(ConfigError, match=rf'loss\.teacher: {message}'):
    FineTune(given, info()).init_frozen()
