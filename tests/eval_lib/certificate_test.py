"""The evaluator of certificates: its rows, its file, the models it offers."""

import itertools
import json
import types
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import ConfigError, InvalidDataError
from eval_lib import risk
from eval_lib.certificate import WeakerError
from halting.row_rules import Confidence
from serve_lib.chain import Encoded, Row
from serve_lib.classifier import CertificateFile
from serve_lib.decisions import ClassifierPolicy
from tests.contexts import evaluator_of
from tests.dataset_lib import corpora, word_rows
from tests.eval_lib.calibration_test import PARITY, VARIABLES, outputs


def smaller(variables, batch):
  """The same answers for half of the FLOPs."""
  whole = outputs(variables, batch)
  flops = jnp.tile(jnp.array([0.5, 1.0]), (len(batch['tokens']), 1))
  return whole | {'flops': flops}


def trained(variables, batch):
  rows = smaller(variables, batch)
  return rows | {'flops': 2 * rows['flops']}


CHEAPER = (({'width': (2, 3)}, jax.jit(smaller)),)


def build(
  workdir='', train='train', kind='certificate', of=outputs, others=CHEAPER,
  **entry,
):  # fmt: skip
  context = dict(
    outputs=jax.jit(of), workdir=workdir, batch_size=256, train_split=train,
    cheaper=others,
  )  # fmt: skip
  return evaluator_of(kind, PARITY, context, **{'split': 'test', **entry})


def read(folder):
  return json.loads((folder / 'certificate.json').read_text())


def test_the_certificate_is_that_of_the_grid(tmp_path):
  kind = 'disagreement'
  built = build(tmp_path, layers=(4, 12), risk=kind, epsilon=0.49)
  result = built.run(VARIABLES)
  entry = read(tmp_path)['sources']['']
  logits, labels = built.heads('split', VARIABLES)
  variant = risk.Variant({}, logits, np.tile([4.0, 12.0], (len(labels), 1)))
  grid = risk.build_grid([variant], labels, kind, 0.49)
  best, bound = risk.choose(grid, kind, 'sequence', 0.49, 0.1)
  assert entry['tau'] == grid.thresholds[best] == result['tau']
  exits = Confidence(entry['tau']).first(logits)
  assert entry['early'] == (exits == 0).mean()
  assert entry['saved'] == pytest.approx(entry['early'] * 8 / 12)
  answers = logits.argmax(-1)
  differs = answers[exits, np.arange(len(labels))] != answers[-1]
  assert entry['mean'] == differs.mean()
  assert entry['mean'] < entry['bound'] == bound <= 0.49
  assert (entry['rows'], entry['test'], entry['model']) == (700, 'binomial', {})
  assert "early exits lose at most 49% by the risk 'disag" in built.note
  assert 'certified on 700 rows of test); ' in built.note


def test_a_cheaper_model_is_certified_with_its_changes(tmp_path):
  unsure = {'scale': jnp.float32(0.2)}
  build(tmp_path, of=trained, cheaper=True, epsilon=0.1).run(unsure)
  entry = read(tmp_path)['sources']['']
  assert entry['model'] == {'width': [2, 3]}
  assert entry['saved'] >= 0.5
  file = CertificateFile(str(tmp_path))
  assert file.sources[''].changes == {'width': (2, 3)}


def test_a_model_without_cheaper_settings_is_told(tmp_path, caplog):
  build(tmp_path, others=(), cheaper=True, epsilon=0.5).run(VARIABLES)
  assert 'no cheaper settings' in caplog.text
  caplog.clear()
  build(tmp_path, cheaper=True, epsilon=0.5, replace=True).run(VARIABLES)
  assert 'no cheaper settings' not in caplog.text


def last(variables, batch):
  """The last head alone."""
  return {k: v[:, -1:] for k, v in outputs(variables, batch).items()}


def test_a_model_of_one_setting_does_not_ask_for_more_rows():
  built = build(of=last, layers=(12,), epsilon=0.01)
  assert 'tau' not in built.measure(VARIABLES)
  assert built.note.startswith('has no choice: the model has no exits')


# What 40 rows need without any loss: log(delta) / log(1 - epsilon).
@pytest.mark.parametrize(
  ('entry', 'rows'),
  [
    (dict(risk='harm'), 114), (dict(risk='harm', delta=0.01), 228),
    (dict(risk='disagreement', epsilon=0.05), 45),
    # Two groups of thresholds, each at delta / 2.
    (dict(risk='harm', layers=(4, 12), cheaper=True), 149),
    (dict(risk='harm', method='pareto'), 227),
    (dict(risk='harm', method='conformal'), 49),
    (dict(), 153), (dict(risk='brier', delta=0.05), 199),
  ],
)  # fmt: skip
def test_too_few_rows_say_how_many_are_needed(entry, rows, tmp_path):
  few = PARITY | {'test_examples': 40}
  result = build(tmp_path, dataset=few, **entry).run(VARIABLES)
  assert result == {'saved': 0.0, 'early': 0.0, 'rows_needed': rows}
  assert read(tmp_path)['sources']['']['bound'] is None
  # They keep what more rows have certified.
  build(tmp_path, epsilon=0.5).run(VARIABLES)
  before = read(tmp_path)
  with pytest.raises(WeakerError, match=f'at least {rows} are needed'):
    build(tmp_path, dataset=few, **entry).run(VARIABLES)
  assert read(tmp_path) == before


def test_what_an_empty_certificate_needs_is_told(tmp_path):
  build(tmp_path, epsilon=0.5).run(VARIABLES)
  assert not [*CertificateFile(str(tmp_path)).warnings()]
  other = {'scale': 2 * VARIABLES['scale']}
  built = build(tmp_path, risk='harm', dataset=PARITY | {'test_examples': 40})
  built.measure(other)
  why = 'certifies nothing: 40 rows; at least 114 are needed'
  assert built.note.startswith(why)
  assert 'in place of one of other parameters, which saved 34.3%' in built.note
  [warning] = CertificateFile(str(tmp_path)).warnings()
  told = f'every row runs at full depth, as the certificate {why}'
  assert warning.startswith(told)


@pytest.mark.parametrize('rows', [1, 2, 3])
def test_a_few_rows_certify_nothing(rows):
  few = PARITY | {'test_examples': rows}
  result = build(dataset=few, method='pareto').run(VARIABLES)
  assert (result['saved'], result['early']) == (0.0, 0.0)


@pytest.mark.parametrize('cost', [1 + 2.2e-16, 1 - 1.1e-16, 1.0])
def test_full_depth_saves_nothing(cost):
  logits = np.zeros((2, 3, 2), np.float32)
  variant = risk.Variant({}, logits, np.ones((3, 2)))
  grid = risk.build_grid([variant], np.zeros(3, int), 'harm', 0.02)
  grid = grid._replace(cost=np.full_like(grid.cost, cost))
  assert (
    str(build()._entry(grid, 0, 0.1, [variant], (0.1, 0.1))['saved']) == '0.0'
  )


def test_a_certificate_is_replaced_by_one_that_promises_as_much(tmp_path):
  build(tmp_path, epsilon=0.5).run(VARIABLES)
  before = read(tmp_path)
  nothing = dict(risk='disagreement', epsilon=1e-6)
  for weaker in (nothing, dict(delta=0.2, epsilon=0.5)):
    with pytest.raises(WeakerError, match=r'saves 34\.3%, as .*replace=true'):
      build(tmp_path, **weaker).run(VARIABLES)
    assert read(tmp_path) == before
  built = build(tmp_path, risk='disagreement', epsilon=0.3)
  assert built.run(VARIABLES)['saved'] < before['sources']['']['saved']
  assert read(tmp_path)['sources']['']['epsilon'] == 0.3
  assert 'one, epsilon 0.5 of accuracy on 700 rows, which saves' in built.note
  more = dict(epsilon=0.5, dataset=PARITY | {'test_examples': 600})
  with pytest.raises(WeakerError, match=r'0\.3 of dis.* 700.* 0\.5 .* 600'):
    build(tmp_path, **more).run(VARIABLES)
  # Nor by another risk, which may be larger.
  for name in ('accuracy', 'harm', 'brier'):
    with pytest.raises(WeakerError, match=f'0.2 of {name} on 700 rows'):
      build(tmp_path, risk=name, epsilon=0.2).run(VARIABLES)
  build(tmp_path, replace=True, **more).run(VARIABLES)
  assert read(tmp_path)['sources']['']['epsilon'] == 0.5


def test_sources_are_kept_for_the_same_parameters(tmp_path):
  for source in ('forum', 'news'):
    build(tmp_path, source=source, epsilon=0.3).run(VARIABLES)
  assert [*read(tmp_path)['sources']] == ['forum', 'news']
  # Certified again on other rows.
  other = PARITY | {'test_examples': 500}
  build(tmp_path, source='news', epsilon=0.3, dataset=other).run(VARIABLES)
  rows = {k: v['rows'] for k, v in read(tmp_path)['sources'].items()}
  assert rows == {'forum': 700, 'news': 500}
  build(tmp_path, epsilon=0.3).run({'scale': 2 * VARIABLES['scale']})
  assert [*read(tmp_path)['sources']] == ['']


def surer(variables, batch):
  """The answers of `trained`, of other confidences, for half of the FLOPs."""
  rows = smaller(variables, batch)
  return rows | {'logits': 0.3 * rows['logits']}


def test_drift_of_a_certified_model_ends(tmp_path):
  unsure = {'scale': jnp.float32(0.2)}
  others = (({'width': 3}, jax.jit(surer)),)
  built = build(tmp_path, of=trained, others=others, cheaper=True, epsilon=0.1)
  built.run(unsure)
  file, turns = CertificateFile(str(tmp_path)), []

  class Model:
    width: int

    def clone(self, **changes):
      return changes

  with pytest.raises(ConfigError, match='width: expected a value of Other'):
    file.serve(type('Other', (), {})(), 'first', None)
  model = Model()
  models, fields = file.serve(model, 'first', lambda *turn: turns.append(turn))
  [other] = models
  rows = built.collect('split', unsure, jax.jit(trained))
  logits = {'first': rows['logits'][:, 0]}
  logits[other] = 0.3 * logits['first']
  chain = types.SimpleNamespace(variants=('first', other))
  reader = types.SimpleNamespace(read=lambda item, variant: Encoded(
    {'row': item}, 1, variant, {}
  ))  # fmt: skip
  policy = ClassifierPolicy(chain, reader, ('a', 'b'), (1,), **fields)
  numbers, rng = [], np.random.default_rng(0)

  def serve(rows, shift):
    for _ in range(rows):
      row = Row(policy.encode(int(rng.integers(700))), 1, Future(), 0.0, 0.0)
      numbers.append(row.encoded.variant)
      answer = logits[row.encoded.variant][row.encoded.inputs['row']]
      row.outputs.append({'logits': shift * answer})
      policy.answer(row)

  serve(3000, 1.0)
  serve(1500, 5.0)
  assert numbers[2999] == other  # no false alarm
  assert numbers[4499] == 'first'
  serve(3000, 1.0)
  assert numbers[-1] == other
  assert [drifted for drifted, _ in turns] == [True, False]
  # A window of 512 rows, four tests in a row of 128 rows each, once no row of
  # the shift is in the window.
  assert numbers[4500:].count('first') <= 512 + 4 * 128
  assert turns[1][1]['distance'] < 0.1


@pytest.mark.parametrize('text', ['{"a":', '[]', '{}', '{"sources": {"": {}}}'])
def test_a_damaged_file_is_found_before_the_work(tmp_path, text):
  (tmp_path / 'certificate.json').write_text(text)
  with pytest.raises(InvalidDataError, match=r'certificate\.json is damaged'):
    build(tmp_path)


def test_rows_that_something_was_fitted_to_are_refused(tmp_path):
  with pytest.raises(ConfigError, match='not trained on, it shares 1 '):
    build(split='train')
  build(tmp_path, '', 'calibration', calibration_split='train').run(VARIABLES)
  with pytest.raises(ConfigError, match='no temperature was fitted to'):
    build(tmp_path, '', split='train').run(VARIABLES)
  build(tmp_path).run(VARIABLES)
  assert read(tmp_path)['temperatures'][0] > 5
  with pytest.raises(ConfigError, match='--evals=calibration'):
    build(tmp_path).run({'scale': 2 * VARIABLES['scale']})


def of_texts(variables, batch):
  """Two heads, of which the last is surer."""
  seen = batch['tokens'].sum(1, keepdims=True).astype(jnp.float32)
  logits = jnp.sin(seen * jnp.arange(1.0, 3.0)[None])
  return {'logits': jnp.stack([logits, 3 * logits], 1)}


@pytest.mark.parametrize(('words', 'left_out'), [
  (['w2'], ''), (6 * ['w2'], '500 copies of others.'),
  (2 * ['w1', 'w2'], '200 with inputs of the training or calibration, 100 c'),
])  # fmt: skip
def test_copies_and_rows_that_something_was_fitted_to_are_left_out(
  tmp_path, words, left_out
):
  vocabulary = tmp_path / 'vocabulary'
  corpora.tokenizer(vocabulary, word_rows.VOCABULARY)

  def data_of(name, words):
    numbers = itertools.product(words, range(10), range(10))
    texts = [f'{w} w{n} w{m},{n % 2}' for w, n, m in numbers]
    path = str(word_rows.write(tmp_path / name, ['text,label', *texts]))
    data = dict(name='texts', path=path, max_length=8)
    return data | {'tokenizer': str(vocabulary)}

  own, context = data_of('own.csv', ['w1']), dict(batch_size=64)
  context |= dict(outputs=jax.jit(of_texts), workdir=tmp_path)
  fitted = dict(calibration_split='validation', split='test')
  evaluator_of('calibration', own, context, **fitted).run(VARIABLES)
  context |= {'train_split': 'train+test'}
  entry = dict(dataset=data_of('new.csv', words), split='all', epsilon=0.5)
  built = evaluator_of('certificate', own, context, **entry)
  built.run(VARIABLES)
  assert read(tmp_path)['sources']['']['rows'] == 100
  assert '100 rows of new.csv' in built.note
  assert built.note.partition('left out: ')[2].startswith(left_out)
  assert left_out or 'left out' not in built.note
  entry['dataset'] = data_of('old.csv', ['w1'])
  built = evaluator_of('certificate', own, context, **entry)
  with pytest.raises(
    InvalidDataError, match=r'old\.csv: .* all 100 rows; give'
  ):
    built.run(VARIABLES)


@pytest.mark.parametrize(('rows', 'epsilon'), [
  (20, 0.1), (60, 0.05), (200, 0.02), (5000, 0.01),
])  # fmt: skip
def test_without_epsilon_it_is_that_of_the_number_of_rows(
  tmp_path, rows, epsilon
):
  built = build(tmp_path, layers=(4, 12), epsilon=0, risk='harm', others=())
  # ln(0.1) / ln(1 - epsilon): 22, 45, 114 and 230 rows, and a quarter more.
  assert built._epsilon(rows, 1) == epsilon
  stated = build(tmp_path, layers=(4, 12), epsilon=0.3)
  assert stated._epsilon(rows, 1) == 0.3


def test_settings_of_one_head_need_the_rows_of_one_group(tmp_path):
  built = build(
    tmp_path, of=last, others=(({'width': 3}, jax.jit(last)),), layers=(12,),
    cheaper=True, epsilon=0, risk='harm',
    dataset=PARITY | {'test_examples': 60},
  )  # fmt: skip
  assert built.run(VARIABLES).keys() == {'saved', 'bound'}
  assert read(tmp_path)['sources']['']['epsilon'] == 0.05
