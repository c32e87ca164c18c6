"""From a run's directory to a service: calibration, coverage, variants."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataset_lib import builder, tokenizer
from dataset_lib.errors import ConfigError
from eat import exits, service
from eval_lib import evaluator
from model_lib.bert import BertClassifier
from serve_lib.chain import InputError
from serve_lib.engine import Engine
from tests.eat import small

pytestmark = pytest.mark.xdist_group('service')

WORDS = [f'w{number}' for number in range(40)]
LENGTH = 16
SIZES = dict(
  num_classes=2, vocab_size=44, max_positions=LENGTH, window=0,
  prune_layers=(1, 2), exit_layers=(3,),
)  # fmt: skip
TEXTS = ['w0 w1 w2 w3 w4 w5 w6', 'w9 w8 w7 w6 w5', 'w1 w2 w3 w4']


def write_data(directory):
  """A vocabulary and SST-2 of random words; returns `config.dataset`."""
  vocabulary = directory / 'vocab.txt'
  vocabulary.write_text('\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', *WORDS]))
  rng = np.random.default_rng(0)
  for name, count in (('train', 200), ('dev', 150)):
    rows = [
      f'{" ".join(rng.choice(WORDS, rng.integers(2, 12)))}\t{rng.integers(2)}'
      for _ in range(count)
    ]
    lines = ['sentence\tlabel', *rows]
    (directory / f'{name}.tsv').write_text('\n'.join(lines))
  return dict(
    name='glue', task='sst2', directory=str(directory),
    tokenizer=str(vocabulary), max_length=LENGTH, length_buckets=(LENGTH,),
  )  # fmt: skip


def outputs(model):
  def call(variables, batch):
    inputs = (batch[name] for name in ('tokens', 'token_types', 'length'))
    _, out = model.apply(variables, *inputs)
    return {'logits': jnp.swapaxes(out['exits'], 0, 1)}

  return jax.jit(call)


def calibrate(directory, dataset, model, variables, **entry):
  """Writes calibration.json as `launch.evaluate` does."""
  context = evaluator.EvalContext(
    measure=lambda variables, batch: {},
    features=lambda variables, batch: None,
    put=jax.device_put,
    seed=0,
    batch_size=50,
    dataset=dataset,
    workdir=str(directory),
    outputs=outputs(model),
  )
  entry = dict(
    type='calibration', split='validation', calibration_split='train',
    layers=model.heads(), threshold=0.55, **entry,
  )  # fmt: skip
  evaluator.build('calibration', entry, context)[0].run(variables)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """(directory, task, variables) of a run with a calibration."""
  directory = tmp_path_factory.mktemp('run')
  dataset = write_data(directory)
  model, variables = small.build(**SIZES)
  tokenizer.load(dataset['tokenizer']).save(directory / 'tokenizer.json')
  calibrate(directory, dataset, model, variables, epsilon=0.2, delta=0.1)
  info = builder.build_source(dataset, 'train').info
  config = {'dataset': dataset}
  task = types.SimpleNamespace(model=model, info=info, config=config)
  return directory, task, variables


@pytest.fixture
def run(finished, tmp_path):
  """The same with a directory that a test may change."""
  directory, task, variables = finished
  for name in ('calibration.json', 'tokenizer.json'):
    (tmp_path / name).write_text((directory / name).read_text())
  return tmp_path, task, variables


def build(run, options=None, thresholds=None, minimum_retention=None, **rest):
  directory, task, variables = run
  return service.build(
    task, variables, str(directory), options or {}, thresholds or {},
    minimum_retention or {}, **rest,
  )  # fmt: skip


def change(directory, **fields):
  """Replaces fields of calibration.json; None removes one."""
  path = directory / 'calibration.json'
  report = json.loads(path.read_text()) | fields
  kept = {key: value for key, value in report.items() if value is not None}
  path.write_text(json.dumps(kept))
  return report


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
  assert error.value.key == f'serve.{field}'
  build(finished, options, **sources)


@pytest.mark.parametrize(
  'options',
  [
    {'tau': 0.55},
    {'tau': 0.99},
    {'tau': 'guaranteed'},
    {'rule': 'entropy', 'tau': 0.65},
    {'rule': 'patience', 'veto_margin': 0.5},
    {'rule': 'never'},
  ],
)
def test_drift_is_checked_whatever_the_rule(finished, options):
  report = json.loads((finished[0] / 'calibration.json').read_text())
  turns = []
  _, policy = build(
    finished, options, on_drift=lambda *turn: turns.append(turn)
  )
  check = policy.monitor.drift
  assert check.calibration.threshold == report['drift']['threshold'] == 0.55
  for confidence in 3 * report['drift']['confidences']:
    policy.monitor.record_exit(3, 'confidence', confidence)
  assert not turns
  assert check.report()['tests'] > 0
  for _ in range(1000):
    policy.monitor.record_exit(3, 'confidence', 1.0)
  assert [drifted for drifted, _ in turns] == [True]
  assert policy.monitor.full_depth


def test_rows_that_are_like_the_calibration_split_do_not_drift(finished):
  """Confidences by the chain are those that the evaluator recorded."""
  chain, policy = build(finished, {'rule': 'never'})
  lines = (finished[0] / 'train.tsv').read_text().splitlines()[1:]
  texts = [line.split('\t')[0] for line in lines]
  seen = []
  policy.monitor.drift.add = seen.append
  with Engine(chain, policy, (LENGTH,), (16,)) as engine:
    answers = engine.predict(texts)
  assert {answer.depth for answer in answers} == {4}
  expected = policy.monitor.drift.calibration.confidences
  np.testing.assert_allclose(np.sort(seen), expected, atol=1e-5)


def test_a_calibration_of_other_parameters_is_refused(finished):
  directory, task, variables = finished
  other = jax.tree.map(lambda leaf: leaf * 1.0001, variables)
  with pytest.raises(ConfigError) as error:
    build((directory, task, other), step=1500)
  assert error.value.key.endswith('calibration.json')
  assert (
    f'run python -m launch.evaluate --workdir={directory} --evals=calibration '
    '--step=1500 --config.evals.calibration.epsilon=0.2 '
    '--config.evals.calibration.delta=0.1'
  ) in str(error.value)


def test_a_file_of_an_older_version_is_read_with_a_warning(run):
  report = change(run[0], parameters=None, dataset=None)
  _, policy = build(run, {'tau': 'guaranteed'})
  (warning,) = policy.warnings
  assert 'does not say of which checkpoint it is' in warning
  assert '--evals=calibration' in warning
  assert policy.settings.rule.tau == report['guarantee']['threshold']
  assert policy.monitor.drift is not None


def test_no_drift_check_says_why(run):
  directory, task, variables = run
  change(directory, drift=None)
  _, policy = build(run)
  assert policy.monitor.drift is None
  assert 'has no statistics' in policy.warnings[0]
  (directory / 'calibration.json').unlink()
  _, policy = build(run)
  (warning,) = policy.warnings
  assert warning.startswith('no drift check: ')
  assert 'calibration.json is not there; run python -m' in warning
  names = dict(task.info.__dict__, class_names=())
  numbers = types.SimpleNamespace(
    model=task.model,
    info=types.SimpleNamespace(**names),
    config=task.config,
  )
  _, policy = build((directory, numbers, variables))
  drift, early = policy.warnings
  assert drift == 'no drift check: a regression has no confidences'
  assert 'a regression with patience=2 waits for 2 heads, and 1 are' in early


@pytest.mark.parametrize(
  'text',
  [
    '{',
    '[]',
    '{"drift": {"confidences": []}}',
    '{"drift": {"confidences": [], "threshold": 0.9}}',
    '{"drift": {"confidences": [0.5], "threshold": "x"}}',
    '{"drift": 3}',
    '{"temperatures": [1.0, 2.0, 3.0]}',
    '{"temperatures": [1.0, -2.0]}',
  ],
)
def test_a_damaged_calibration_is_a_readable_error(run, text):
  (run[0] / 'calibration.json').write_text(text)
  with pytest.raises(ConfigError, match=r'calibration\.json|temperatures'):
    build(run)


def test_only_what_can_be_reached_is_compiled(finished):
  assert build(finished)[0].variants == ('pruned',)
  chain, policy = build(finished, minimum_retention={'forum': 0.0})
  assert chain.variants == ('pruned',)
  assert policy.encode({'text': 'w0', 'source': 'forum'}).variant == 'pruned'
  chain, policy = build(finished, minimum_retention={'forum': 0.9})
  assert chain.variants == ('pruned', 'full')
  assert 'served without pruning (forum)' in policy.warnings[0]


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
  assert service.num_texts({'name': 'glue', 'task': 'mnli'}) == 2
  assert service.num_texts({'name': 'glue', 'task': 'sst2'}) == 1
  assert service.num_texts({'name': 'fake_text'}) is None
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
  assert error.value.key == key
  # Without the number of classes nothing can be said against it.
  settings = service.settings_of(str(finished[0]), options, thresholds, {})
  assert settings.rule.name == 'entropy'
  with pytest.raises(ConfigError, match=r'nats in \[0, log C\)'):
    service.settings_of(str(finished[0]), {'rule': 'entropy'}, {}, {})


@pytest.mark.parametrize(
  ('options', 'warns'),
  [
    ({'rule': 'patience', 'patience': 1}, False),
    ({'rule': 'patience'}, True),
    ({'rule': 'combined', 'tau': 0.6, 'patience': 3}, True),
    ({'rule': 'confidence', 'patience': 3}, False),
    ({'rule': 'never'}, False),
  ],
)
def test_a_rule_by_which_nobody_leaves_early_is_told(finished, options, warns):
  warnings = build(finished, options)[1].warnings
  if not warns:
    assert warnings == ()
    return
  (warning,) = warnings
  assert warning.startswith('no row will ever leave early: rule=')
  assert 'and 1 are before the last layer (at 3)' in warning


def test_texts_cut_off_before_those_of_the_calibration_are_told(finished):
  _, policy = build(finished, max_length=8)
  assert policy.encode(' '.join(WORDS[:10])).length == 8
  (warning,) = policy.warnings
  assert 'texts are cut off after 8 tokens, those of the calibration' in warning
  assert build(finished, max_length=LENGTH)[1].warnings == ()
