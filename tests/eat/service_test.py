"""From a run's directory to a service: thresholds, coverage, variants."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataset_lib import glue_tasks
from dataset_lib.errors import ConfigError
from eat import exits, service
from model_lib.bert import BertClassifier
from serve_lib.chain import InputError
from serve_lib.engine import Engine
from tests.eat import small
from tests.eat.calibrated import LENGTH, SIZES, build, change

TEXTS = ['w0 w1 w2 w3 w4 w5 w6', 'w9 w8 w7 w6 w5', 'w1 w2 w3 w4']


def last_head(model, variables, chain, policy, texts, **options):
  """Probabilities `[B, C]` by a plain call of the model."""
  rows = [policy.encode(text).inputs for text in texts]
  batch = jax.tree.map(jnp.asarray, chain.pad(rows, LENGTH, len(rows)))
  inputs = (batch[name] for name in ('tokens', 'token_types', 'length'))
  logits, _ = jax.jit(model.apply)(variables, *inputs, **options)
  return exits.softmax(np.asarray(logits))


def test_the_guaranteed_threshold_of_a_real_file(finished):
  report = json.loads((finished[0] / 'calibration.json').read_text())
  chain, policy = build(finished, {'tau': 'guaranteed'})
  rule = policy.settings.rule
  assert rule == exits.Rule('confidence', tau=report['guarantee']['threshold'])
  assert 0.5 < rule.tau <= 1.0
  assert policy.settings.temperatures == tuple(report['temperatures'])
  assert len(report['temperatures']) == chain.num_stages == 2
  assert policy.warnings == ()


def test_a_guarantee_that_nothing_met_is_told(run):
  report = json.loads((run[0] / 'calibration.json').read_text())
  change(run[0], guarantee=report['guarantee'] | {'threshold': None})
  _, policy = build(run, {'tau': 'guaranteed'})
  assert policy.settings.rule.name == 'never'
  (warning,) = policy.warnings
  assert 'could certify no threshold' in warning


def test_a_guarantee_on_rows_that_share_texts_is_qualified(run):
  report = json.loads((run[0] / 'calibration.json').read_text())
  change(run[0], dataset=report['dataset'] | {'task': 'mnli'})
  _, policy = build(run, {'tau': 'guaranteed'})
  assert 'more often than its delta' in policy.warnings[-1]
  assert build(run)[1].warnings == ()


@pytest.mark.parametrize(
  ('field', 'options', 'sources'),
  [
    ('ensemble_margin', {'ensemble_margin': 0.1}, {}),
    ('veto_margin', {'veto_margin': 0.1}, {}),
    ('thresholds', {}, {'thresholds': {'forum': 0.9}}),
    ('minimum_retention', {}, {'minimum_retention': {'forum': 0.9}}),
  ],
)
def test_what_was_not_certified_is_refused(finished, field, options, sources):
  with pytest.raises(ConfigError, match='certified without it') as error:
    build(finished, {'tau': 'guaranteed', **options}, **sources)
  assert error.value.field == f'serve.{field}'
  build(finished, options, **sources)


@pytest.mark.parametrize('name', ['veto_margin', 'ensemble_margin'])
def test_a_regression_has_no_margin(tmp_path, name):
  with pytest.raises(ConfigError, match='0 for a regression') as error:
    service.settings_of(str(tmp_path), {name: 0.1}, {}, {}, num_classes=0)
  assert error.value.field == f'serve.{name}'
  service.settings_of(str(tmp_path), {name: 0.1}, {}, {}, num_classes=2)


def test_only_what_can_be_reached_is_compiled(finished):
  assert build(finished)[0].variants == ('pruned',)
  chain, policy = build(finished, minimum_retention={'forum': 0.0})
  assert chain.variants == ('pruned',)
  assert policy.encode({'text': 'w0', 'source': 'forum'}).variant == 'pruned'
  chain, policy = build(finished, minimum_retention={'forum': 0.9})
  assert chain.variants == ('pruned', 'full')
  assert 'served without pruning (forum)' in policy.warnings[0]


@pytest.mark.slow
def test_a_source_with_minimum_retention_gets_the_unpruned_model(finished):
  _, task, variables = finished
  chain, policy = build(
    finished, {'rule': 'never'}, minimum_retention={'forum': 0.95}
  )
  items = [{'text': text, 'source': 'forum'} for text in TEXTS]
  assert policy.encode(items[0]).variant == 'full'
  with Engine(chain, policy, (LENGTH,), (1,)) as engine:
    answers = {'unpruned': engine.predict(items), '': engine.predict(TEXTS)}
  temperature = policy.settings.temperatures[-1]
  expected = {}
  for name, scale in (('unpruned', 0.0), ('', 1.0)):
    plain = last_head(
      task.model, variables, chain, policy, TEXTS,
      prune_scale=jnp.float32(scale),
    )  # fmt: skip
    expected[name] = exits.softmax(np.log(plain) / temperature)
    for row, answer in zip(expected[name], answers[name], strict=True):
      got = list(answer.probabilities.values())
      np.testing.assert_allclose(got, row, atol=1e-5)
      assert (answer.retention == 1.0) == (name == 'unpruned')
  # The two differ by far more than the tolerance.
  assert np.abs(expected['unpruned'] - expected['']).max() > 1e-3


def test_a_dense_run_is_served_as_it_is(run):
  directory, task, _ = run
  (directory / 'calibration.json').unlink()
  skip = ('prune_layers', 'prune_ratios', 'window', 'exit_layers')
  fields = {
    name: value
    for name, value in (small.FIELDS | SIZES).items()
    if name not in skip
  }
  model = BertClassifier(**fields)
  row = jnp.ones((1, 8), jnp.int32)
  variables = small.randomised(
    jax.eval_shape(model.init, jax.random.key(0), row, row, jnp.full(1, 8))
  )
  dense = types.SimpleNamespace(model=model, info=task.info, config=task.config)
  chain, policy = build((directory, dense, variables))
  assert (chain.heads, chain.variants) == ((4,), ('full',))
  assert 'the model has no head before its last layer' in policy.warnings[-1]
  with Engine(chain, policy, (LENGTH,), (1,)) as engine:
    answers = engine.predict(TEXTS)
  expected = last_head(model, variables, chain, policy, TEXTS)
  for row, answer in zip(expected, answers, strict=True):
    got = list(answer.probabilities.values())
    np.testing.assert_allclose(got, row, atol=1e-5)
    assert (answer.depth, answer.exit_reason) == (4, 'last layer')
    assert answer.retention == 1.0


def test_another_model_is_no_run_that_can_be_served():
  with pytest.raises(ConfigError, match=r'expected eat\.model:EatC'):
    service.as_adaptive(object())


def test_the_number_of_texts_comes_from_the_data_set(finished):
  assert glue_tasks.num_texts({'name': 'glue', 'task': 'mnli'}) == 2
  assert glue_tasks.num_texts({'name': 'glue', 'task': 'sst2'}) == 1
  assert glue_tasks.num_texts({'name': 'fake_text'}) is None
  _, policy = build(finished)
  with pytest.raises(InputError, match='pair: expected none'):
    policy.encode(('w0', 'w1'))


def test_an_illegal_threshold_is_refused_before_anything_is_served(finished):
  with pytest.raises(ConfigError, match=r'thresholds\.forum: expected a prob'):
    build(finished, thresholds={'forum': 1.5})
  with pytest.raises(ConfigError, match="none with the rule 'patience'"):
    build(finished, {'rule': 'patience'}, {'forum': 0.9})
  build(finished, {'rule': 'entropy', 'tau': 0.5}, {'forum': 0.69})


def test_the_default_threshold_is_that_of_confidence_alone(finished):
  assert build(finished)[1].settings.rule == exits.Rule('confidence', tau=0.9)
  for rule, legal in (
    ('entropy', r'nats in \[0, 0.6931\), the entropy of 2 classes that'),
    ('margin', r'a difference of two probabilities, in \[0, 1\]'),
    ('combined', r'a probability in \[0, 1\], where 0.5 is the least that'),
  ):
    with pytest.raises(ConfigError, match=f'serve.tau: expected {legal}'):
      build(finished, {'rule': rule})
    build(finished, {'rule': rule, 'tau': 0.6})
  for rule in ('patience', 'never'):
    assert build(finished, {'rule': rule})[1].settings.rule.tau is None


@pytest.mark.parametrize(
  ('options', 'thresholds', 'key'),
  [
    ({'tau': 0.6932}, {}, 'serve.tau'),
    ({'tau': 0.9}, {}, 'serve.tau'),
    ({'tau': 0.1}, {'forum': 0.7}, 'thresholds.forum'),
  ],
)
def test_an_entropy_that_every_row_has_is_no_threshold(
  finished, options, thresholds, key
):
  options = {'rule': 'entropy', **options}
  with pytest.raises(ConfigError, match='every row would leave') as error:
    build(finished, options, thresholds)
  assert error.value.field == key
  # Without the number of classes nothing can be said against it.
  settings = service.settings_of(str(finished[0]), options, thresholds, {})
  assert settings.rule.name == 'entropy'
  with pytest.raises(ConfigError, match=r'nats in \[0, log C\)'):
    service.settings_of(str(finished[0]), {'rule': 'entropy'}, {}, {})


@pytest.mark.parametrize(
  ('options', 'key'),
  [
    ({'rule': 'confidense'}, 'serve.rule'),
    ({'tau': -1.0}, 'serve.tau'),
    ({'tau': 'sure'}, 'serve.tau'),
    ({'patience': 0}, 'serve.patience'),
    ({'tauu': 0.9}, 'serve.tauu'),
    ({'tau': 'guaranteed'}, 'serve.tau'),
    ({'rule': 'margin', 'tau': 1.5}, 'serve.tau'),
    ({'rule': 'margin'}, 'serve.tau'),
    ({'rule': 'entropy'}, 'serve.tau'),
    ({'rule': 'combined'}, 'serve.tau'),
  ],
)
def test_illegal_options_are_named(options, key):
  from dataset_lib.fields import check_fields

  with pytest.raises(ConfigError) as error:
    service.rule_of(check_fields(options, service.OPTIONS, 'serve'), {})
  assert error.value.field == key


def test_the_guaranteed_threshold_is_the_certified_one():
  given = {name: field.default for name, field in service.OPTIONS.items()}
  given['tau'] = 'guaranteed'
  certified = {'guarantee': {'threshold': 0.97}}
  assert service.rule_of(given, certified).tau == 0.97
  given['rule'], given['tau'] = 'patience', None
  assert service.rule_of(given, certified).tau is None
  given['rule'], given['tau'] = 'confidence', 'guaranteed'
  nothing = {'guarantee': {'threshold': None}}
  assert service.rule_of(given, nothing).name == 'never'
