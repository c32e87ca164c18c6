"""`Task.serve` of an EAT: options, calibration, variants, warnings."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from core.errors import ConfigError, InvalidDataError
from eat.chain import as_adaptive
from halting.row_rules import Combined, Confidence, Entropy, Margin, Never
from model_lib.bert import BertClassifier, Pooler
from serve_lib import description
from serve_lib.chain import InputError
from serve_lib.engine import Engine
from tests.eat import calibrated, small
from tests.eat.calibrated import (
  LENGTH,
  SIZES,
  WORDS,
  build,
  bundled,
  refused,
  regression,
  task_of,
)

TEXT = 'w0 w1 w2 w3 w4 w5 w6'


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  return calibrated.make(tmp_path_factory.mktemp('run'))


@pytest.fixture
def run(finished, tmp_path):
  """The same with a directory that a test may change."""
  directory, task, variables = finished
  for name in ('calibration.json', 'certificate.json', 'tokenizer.json'):
    (tmp_path / name).write_text((directory / name).read_text())
  return tmp_path, task, variables


def test_the_guaranteed_threshold_of_a_real_file(finished):
  report = json.loads((finished[0] / 'calibration.json').read_text())
  certificate = json.loads((finished[0] / 'certificate.json').read_text())
  chain, policy = build(finished, {'tau': 'guaranteed'})
  tau = certificate['sources']['']['tau']
  assert policy.rule == Confidence(tau)
  assert policy.monitor.drift.threshold == tau
  assert 0.5 < policy.rule.tau <= 1.0
  np.testing.assert_allclose(policy.temperatures, report['temperatures'])
  assert len(report['temperatures']) == chain.num_stages == 2
  assert policy.warnings == ()


@pytest.mark.parametrize(('options', 'rule'), [
  ({}, Confidence(0.9)), ({'rule': 'never'}, Never()),
  ({'rule': 'entropy', 'tau': 0.6, 'thresholds': {'forum': 0.69}},
   Entropy(0.6)),
  ({'rule': 'combined', 'tau': 0.6, 'patience': 1, 'veto_margin': 0.1},
   Combined(0.6, 1, veto_margin=0.1)),
  ({'rule': 'halting.row_rules:Margin', 'rule.tau': 0.2}, Margin(0.2)),
])  # fmt: skip
def test_options_describe_a_rule(finished, options, rule):
  assert build(finished, options)[1].rule == rule


FORUM = {'forum': 0.9}


@pytest.mark.parametrize(('options', 'field', 'expected'), [
  ({'rule': 'confidense'}, 'rule', 'one of confidence'),
  ({'tau': 2.0}, 'tau', '[0, 1]'), ({'tauu': 0.9}, 'tauu', "mean 'tau'?"),
  ({'rule': 'entropy'}, 'tau', 'every row would leave: rule=entropy has no'),
  ({'rule': 'entropy', 'tau': math.log(2)}, 'tau', '0.6931), the entropy of 2'),
  ({'rule': 'entropy', 'tau': 0.1, 'thresholds': FORUM}, 'thresholds.forum',
   'nats in'), ({'rule': 'combined'}, 'tau', 'of the surest of 2 >= 0.5'),
  ({'thresholds': {'forum': math.nan}}, 'thresholds.forum', 'a probability in'),
  ({'rule': 'patience', 'thresholds': FORUM}, 'thresholds', "'patience'"),
  ({'minimum_retention': {'forum': 1.5}}, 'minimum_retention.forum', '1.0]'),
  ({'tau': 'guaranteed', 'rule': 'margin'}, 'tau', 'rule=confidence'),
  ({'tau': 'guaranteed', 'thresholds': FORUM}, 'thresholds',
   'certified without it'),
])  # fmt: skip
def test_illegal_options_are_refused(finished, options, field, expected):
  refused(finished, options, f'serve.{field}', expected)


@pytest.mark.parametrize(('lengths', 'tau', 'expected'), [
  ((8, 32), 0.9, 'from 1 to 16, the longest row'),
  ((4,), 0.9, 'one of them >= 5'), ((0, 16), 0.9, 'from 1 to 16'),
  ((), 0.9, 'from 1 to 16'), ((8,), 'guaranteed', '16 among them'),
])  # fmt: skip
def test_illegal_lengths_are_refused(finished, lengths, tau, expected):
  refused(finished, {'tau': tau}, 'lengths', expected, lengths)


def test_a_regression_has_no_margins_and_thresholds(run):
  number = regression(run)
  given = {'veto_margin': 0.1, 'ensemble_margin': 0.1, 'thresholds': FORUM}
  for field, value in given.items():
    refused(number, {field: value}, f'serve.{field}', 'for a regression')
  build(number, {'rule': 'entropy'})


@pytest.mark.parametrize('read', [lambda _, *run: run, bundled])
def test_only_reachable_variants_are_compiled(finished, tmp_path, read):
  chain, policy = build(finished, {'minimum_retention': {'forum': 0.0}})
  assert chain.variants == ('pruned',)
  assert policy.encode({'text': 'w0', 'source': 'forum'}).variant == 'pruned'
  options = {'minimum_retention': FORUM | {'news': 0.1}}
  options |= {'rule': 'margin', 'tau': 0.3, 'ensemble_margin': 0.25}
  chain, policy = read(tmp_path / 'x', *build(finished, options))
  assert chain.variants == ('pruned', 'unpruned')
  for source, variant in (('forum', 'unpruned'), ('news', 'pruned')):
    found = policy.encode({'text': TEXT, 'source': source})
    assert found.variant == variant
  assert 'served without pruning (forum, news)' in policy.warnings[0]
  own = {'text': TEXT, 'source': 'news', 'minimum_retention': 1}
  assert policy.encode(own).variant == 'unpruned'
  assert policy.encode(own | {'minimum_retention': 0.0}).variant == 'pruned'
  for wrong in (1.5, True, '1', None):
    with pytest.raises(InputError, match=r'minimum_retention: .* \[0, 1\]'):
      policy.encode(own | {'minimum_retention': wrong})
  chain, policy = read(tmp_path / 'x', *build(finished))
  assert chain.variants == ('pruned',)
  with pytest.raises(InputError, match='minimum_retention: expected at most'):
    policy.encode(own)


class Own(BertClassifier, kw_only=True):
  """An encoder of a user, with another pooler."""

  @nn.nowrap
  def pooler_kind(self):
    """See the base."""
    return functools.partial(Pooler, 'relu', dtype=self.dtype)


@pytest.mark.parametrize('kind', [BertClassifier, Own])
def test_a_dense_run_is_served_as_one_stage(run, kind):
  directory, task, _ = run
  names = {field.name for field in dataclasses.fields(BertClassifier)}
  fields = (small.FIELDS | SIZES).items()
  model = kind(**{k: v for k, v in fields if k in names})
  row = jnp.ones((1, 8), jnp.int32)
  variables = small.randomised(
    jax.eval_shape(model.init, jax.random.key(0), row, row, jnp.full(1, 8))
  )
  (directory / 'calibration.json').unlink(missing_ok=True)
  dense = task_of(model, task.info, task.config['dataset'])
  chain, policy = build((directory, dense, variables))
  assert (chain.heads, chain.variants) == ((4,), ('unpruned',))
  assert 'the model has no head before its last layer' in policy.warnings[-1]
  with Engine(chain, policy, (LENGTH,), (1,)) as engine:
    (answer,) = engine.predict([TEXT])
  batch = chain.pad([policy.encode(TEXT).inputs], LENGTH, 1)
  logits, _ = jax.jit(model.apply)(variables, *map(jnp.asarray, batch.values()))
  got = list(answer.probabilities.values())
  np.testing.assert_allclose(got, jax.nn.softmax(logits[0]), atol=1e-5)
  assert (answer.fields['depth'], answer.fields['retention']) == (4, 1.0)
  assert answer.fields['exit_reason'] == 'last layer'
  given = directory, dense, variables
  refused(given, {'tau': 'guaranteed'}, 'serve.tau', 'has no exits to certify')
  with pytest.raises(ConfigError, match=r'expected eat\.model:EatC'):
    as_adaptive(object())


def test_the_run_says_how_texts_are_read(finished):
  _, policy = build(finished, lengths=(8, 6))
  assert policy.lengths == (6, 8)
  assert policy.encode(' '.join(WORDS[:10])).length == 8
  with pytest.raises(InputError, match='pair: expected none'):
    policy.encode(('w0', 'w1'))


@pytest.mark.parametrize(('changes', 'options', 'lengths', 'warnings'), [
  ({'dataset': {'task': 'mnli'}}, {}, (LENGTH,), ()),
  ({'parameters': None, 'dataset': None}, {'tau': 'guaranteed'}, None,
   ['does not name its checkpoint']),
  ({'drift': None}, {}, None, ['has no statistics']),
  ({}, {'rule': 'patience', 'patience': 1}, None, ()),
  ({}, {'rule': 'patience'}, None, ['no row will ever leave early: rule=']),
  ({}, {'rule': 'combined', 'tau': 0.6, 'patience': 3}, None,
   ['and 1 are before the last layer (at 3)']),
  ({}, {}, (8,), ['texts are cut off after 8 tokens, in the']),
])  # fmt: skip
def test_warnings(run, changes, options, lengths, warnings):
  path = run[0] / 'calibration.json'
  report = json.loads(path.read_text()) | changes
  kept = {key: value for key, value in report.items() if value is not None}
  path.write_text(json.dumps(kept))
  _, policy = build(run, options, lengths)
  for found, expected in zip(policy.warnings, warnings, strict=True):
    assert expected in found


def certified(run, sources):
  """Replaces the certificate of '' by changed ones of sources."""
  path = run[0] / 'certificate.json'
  report = json.loads(path.read_text())
  entry = report['sources']['']
  report['sources'] = {name: entry | new for name, new in sources.items()}
  path.write_text(json.dumps(report))


@pytest.mark.parametrize('read', [lambda _, *run: run[:2], bundled])
def test_each_source_has_its_certificate(run, read):
  ratios = {'prune_ratios': [0.5, 0.5]}
  certified(run, {'forum': {'tau': 0.7}, 'news': {'tau': 0.6, 'model': ratios}})
  turned = []

  def on_drift(drifted, report):
    turned.append((drifted, report['source']))

  chain, policy = build(run, {'tau': 'guaranteed'}, on_drift=on_drift)
  name = 'prune_ratios=(0.5, 0.5)'
  assert chain.sizes(name, 16) == (9, 5)
  chain, policy = read(run[0] / 'bundle', chain, policy, on_drift)
  assert policy.rule.tau == np.inf  # of all other sources
  assert policy.thresholds == {'forum': 0.7, 'news': 0.6}
  assert chain.variants == ('pruned', name)
  variants = {'forum': 'pruned', 'news': name, '': 'pruned'}
  items = [{'text': TEXT, 'source': source} for source in variants]
  assert [policy.encode(x).variant for x in items] == [*variants.values()]
  with pytest.raises(InputError, match='minimum_retention: expected none'):
    policy.encode(items[0] | {'minimum_retention': 0.0})
  # Drift of a source withdraws its certificate, and no other.
  for _ in range(1000):
    policy.monitor.record_exit(3, 'confidence', 1.0, source='news')
  assert turned == [(True, 'news')]
  full = [policy.monitor.full_depth(source) for source in variants]
  assert full == [False, True, False]
  assert policy.encode(items[1]).variant == 'pruned'
  with Engine(chain, policy, (LENGTH,), (1,)) as engine:
    *_, last = answers = engine.predict(items)
    about = description.about(engine, 'run')
  promises = [
    (one['source'], one['tau'], one['model']) for one in about['certificates']
  ]
  assert promises == [('forum', 0.7, {}), ('news', 0.6, ratios)]
  assert about['options']['rule'] == repr(policy.rule)
  assert about['options']['thresholds'] == policy.thresholds
  assert about['model'] == 'eat.model:EatClassifier'
  assert str(run[0]) not in json.dumps(about)
  assert [*about['example']['POST /predict']] == ['text']
  pairs = dataclasses.replace(policy.reader, num_texts=2)
  assert [*description.sample(pairs)] == ['text', 'pair']
  assert last.fields['depth'] == answers[1].fields['depth'] == 4


@pytest.mark.parametrize(('changes', 'warning'), [
  ({'tau': None}, 'full depth, as the certificate certifies nothing: '),
  ({'dataset': {'task': 'mnli'}}, 'more often than its delta'),
])  # fmt: skip
def test_warnings_of_a_certificate(run, changes, warning):
  certified(run, {'': changes})
  _, policy = build(run, {'tau': 'guaranteed'})
  assert [warning in found for found in policy.warnings] == [True]
  assert (policy.rule == Never()) == ('tau' in changes)
  if policy.rule == Never():
    with pytest.raises(ConfigError, match='thresholds: expected none with'):
      dataclasses.replace(policy, thresholds={'forum': 0.9})


@pytest.mark.parametrize(('changes', 'field'), [
  ({'temperatures': [9.0, 9.0]}, 'temperatures'),
  ({'parameters': 'crc32:0'}, 'certificate.json'),
  ({'sources': {'': {}}}, 'sources'), ({'sources': 3}, 'sources'),
])  # fmt: skip
def test_a_certificate_of_another_run_is_refused(run, changes, field):
  path = run[0] / 'certificate.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))
  with pytest.raises(ConfigError, match='--evals=certificate') as error:
    build(run, {'tau': 'guaranteed'}, step=1500)
  assert error.value.field.endswith(field)
  build(run, {'tau': 0.7}) if field != 'sources' else None
  path.unlink()
  command = f'--workdir={run[0]} --evals=certificate'
  refused(run, {'tau': 'guaranteed'}, 'serve.tau', command)


def test_warnings_without_a_calibration(run):
  (run[0] / 'calibration.json').unlink()
  (warning,) = build(run)[1].warnings
  assert re.match('no drift check: .*n.json does not exist; run pyth', warning)
  drift, early = build(regression(run))[1].warnings
  assert drift == 'no drift check: a regression has no confidences'
  assert 'a regression needs 2 heads, and 1 are' in early


@pytest.mark.parametrize('options', [{'tau': 0.55}, {'rule': 'never'}])
def test_drift_is_checked_with_every_rule(finished, options):
  report = json.loads((finished[0] / 'calibration.json').read_text())
  turns = []
  _, policy = build(finished, options, on_drift=lambda *x: turns.append(x))
  check = policy.monitor.drift
  assert check.threshold == report['drift']['threshold'] == 0.55
  for confidence in 3 * report['drift']['confidences']:
    policy.monitor.record_exit(3, 'confidence', confidence)
  assert not turns
  assert check.report()['tests'] > 0
  for _ in range(1000):
    policy.monitor.record_exit(3, 'confidence', 1.0)
  assert [drifted for drifted, _ in turns] == [True]
  assert policy.monitor.full_depth()


def test_confidences_of_the_chain_are_those_of_the_evaluator(finished):
  chain, policy = build(finished, {'rule': 'never'})
  lines = (finished[0] / 'train.tsv').read_text().splitlines()[1:]
  texts, seen = [line.split('\t')[0] for line in lines], []
  policy.monitor.drift.add = seen.append
  with Engine(chain, policy, (LENGTH,), (16,)) as engine:
    answers = engine.predict(texts)
  assert {answer.fields['depth'] for answer in answers} == {4}
  expected = policy.monitor.drift.confidences
  np.testing.assert_allclose(np.sort(seen), expected, atol=1e-5)


def test_a_calibration_of_other_parameters_is_refused(finished):
  directory, task, variables = finished
  other = jax.tree.map(lambda leaf: leaf * 1.0001, variables)
  command = f'--workdir={directory} --evals=calibration --step=1500'
  with pytest.raises(ConfigError, match=f'calibration.json: .*{command}'):
    build((directory, task, other), step=1500)


@pytest.mark.parametrize('part', [
  *({'drift': one} for one in (
    3, {'confidences': []}, {'confidences': [], 'threshold': 0.9},
    {'confidences': [0.5], 'threshold': 'x'})),
  *({'temperatures': one} for one in ([1., 2., 3.], [1., -2.], 1., [], None)),
  *({'layers': one} for one in ([4, 2], [1, 2], [], None)),
])  # fmt: skip
def test_a_damaged_calibration_is_a_readable_error(run, part):
  content = {'temperatures': [1.0, 1.0], **part}
  (run[0] / 'calibration.json').write_text(json.dumps(content))
  with pytest.raises(ConfigError, match=r'calibration\.json: \w') as error:
    build(run)
  assert error.value.exit_code == InvalidDataError.exit_code
