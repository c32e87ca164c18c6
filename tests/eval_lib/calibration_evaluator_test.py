"""The evaluator 'calibration': what it fits, certifies, writes and refuses."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataset_lib.errors import ConfigError
from eval_lib import calibration, evaluator, predictions
from eval_lib.calibration import fit_temperature, reliability
from tests.contexts import eval_context

PARITY = dict(name='parity', length=10, train_examples=900, test_examples=700)


def outputs(variables, batch):
  """Two over-confident heads that know a part of the sequence."""
  heads = []
  for seen, scale in ((6, 4.0), (10, 2.0)):
    ones = (batch['tokens'][:, :seen] == 0).sum(1)
    sign = 1.0 - 2.0 * (ones % 2).astype(jnp.float32)
    # Tokens that have nothing to do with it make the margin vary.
    margin = 1.0 + batch['tokens'][:, 0].astype(jnp.float32)
    heads.append(scale * jnp.stack([sign * margin, -sign * margin], 1))
  return {'logits': jnp.stack(heads, 1) * variables['scale']}


def build(workdir='', **entry):
  context = eval_context(PARITY, jax.jit(outputs), 256, workdir)
  entry = dict(split='test', calibration_split='train') | entry
  return evaluator.build('ece', dict(type='calibration') | entry, context)[0]


VARIABLES = {'scale': jnp.float32(1.0)}


def test_evaluator_fits_on_one_split_and_reports_the_other(tmp_path):
  built = build(tmp_path, layers=(4, 12))
  result = built.run(VARIABLES)
  report = json.loads((tmp_path / 'calibration.json').read_text())
  held_out, test = (
    predictions.collect(d, VARIABLES, built.context)
    for d in (built._fitted, built._reported)
  )
  for head, name in enumerate(('layer_4', 'layer_12')):
    temperature = 1.0
    logits = held_out['logits'][:, head].astype(np.float64)
    rows = predictions.probabilities(logits[None])[0]
    if reliability(rows, held_out['label']).error > 0.02:
      temperature = fit_temperature(logits, held_out['label'])
    logits = test['logits'][:, head].astype(np.float64)
    for key, t in (('ece', 1.0), ('ece_calibrated', temperature)):
      rows = predictions.probabilities(logits[None] / t)[0]
      expected = reliability(rows, test['label']).error
      # In float64 here, in float32 there.
      assert result[f'{key}_{name}'] == pytest.approx(expected, abs=1e-6)
      assert report[key][head] == result[f'{key}_{name}']
    assert result[f'temperature_{name}'] == pytest.approx(temperature)
    assert report['temperatures'][head] == result[f'temperature_{name}']
  # The first head guesses, with confidence; the last one knows.
  assert result['temperature_layer_4'] > 5
  assert result['ece_layer_4'] > 0.3 > result['ece_calibrated_layer_4']
  assert result['temperature_layer_12'] == 1.0
  assert len(result) == 6
  assert report['guarantee'] is None
  assert (report['calibration_rows'], report['rows']) == (900, 700)
  assert (report['calibration_split'], report['split']) == ('train', 'test')
  assert report['layers'] == [4, 12]
  assert report['drift']['threshold'] == 0.9
  assert len(report['drift']['confidences']) == 900
  assert report['parameters'] == calibration.fingerprint(VARIABLES)
  assert report['dataset']['name'] == 'parity'
  assert report['dataset']['train_examples'] == 900


def test_evaluator_certifies_on_the_split_that_nothing_was_fitted_to(tmp_path):
  built = build(tmp_path, epsilon=0.49, delta=0.1)
  result = built.run(VARIABLES)
  guarantee = json.loads((tmp_path / 'calibration.json').read_text())[
    'guarantee'
  ]
  assert guarantee['rows'] == 700
  assert guarantee['loss'] == 'disagreement'
  assert guarantee['bound'] <= guarantee['epsilon'] == 0.49
  assert result['guaranteed_early'] == guarantee['early'] < 1.0
  strict = build(tmp_path, epsilon=0.001, delta=0.1)
  result = strict.run(VARIABLES)
  assert result['guaranteed_early'] == 0.0
  assert 'guaranteed_threshold' not in result


def test_evaluator_writes_nothing_without_a_workdir(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert 'ece_head_1' in build().run(VARIABLES)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ('entry', 'key'),
  [
    (dict(calibration_split='test'), 'calibration_split'),
    (dict(calibration_split='dev'), 'evals.ece.calibration_split'),
    (dict(bins=0), 'evals.ece.bins'),
    (dict(only_above=-0.1), 'evals.ece.only_above'),
    (dict(layers=(4, 2)), 'evals.ece.layers'),
    (dict(delta=0.0), 'evals.ece.delta'),
  ],
)
def test_illegal_fields_are_named(entry, key):
  with pytest.raises(ConfigError) as caught:
    build(**entry)
  assert caught.value.field == key


def test_the_calibration_split_must_be_given():
  entry = dict(type='calibration', split='test')
  with pytest.raises(ConfigError, match=r'calibration_split: .*got .nothing'):
    evaluator.validate(dict(dataset=PARITY, evals=dict(ece=entry)))


def test_layers_must_fit_the_heads():
  with pytest.raises(ConfigError, match='layers: expected 2 layers'):
    build(layers=(4, 8, 12)).run(VARIABLES)
