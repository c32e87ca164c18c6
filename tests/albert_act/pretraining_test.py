"""The pretraining objective against plain sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import linen as nn

from albert_act.pretraining import Pretraining
from core.errors import ConfigError
from dataset_lib import builder
from eval_lib.metrics import compute
from launch import command_line
from tests import losses
from tests.albert_act import small
from tests.dataset_lib import corpora
from train_lib import config_schema

FIELDS = {k: v for k, v in small.FIELDS.items() if k != 'vocab_size'}
MODEL = dict(
  name='albert_act.model:AlbertPretraining', vocab_size=0,
  classifier_dropout=0.0, **FIELDS | {'max_positions': 32},
)  # fmt: skip
TAU = 0.01


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  directory, _ = corpora.prepare(
    tmp_path_factory.mktemp('corpus'), corpora.documents(20)
  )
  return directory


def config_of(corpus, **changes):
  config = dict(
    task='albert_act.pretraining:Pretraining', dtype='float32', model=MODEL,
    dataset=corpora.pretraining_config(corpus, mask_share=0.2),
    loss=dict(ponder_weight=TAU, sop_weight=0.5),
  )  # fmt: skip
  config['model'] = MODEL | {'vocab_size': len(corpora.VOCABULARY)}
  return config | changes


@pytest.fixture(scope='module')
def case(corpus):
  """(task, batch with a row of padding, parameters)."""
  data = builder.build(
    corpora.pretraining_config(corpus), split='train', train=True, seed=3,
    batch_size=8, num_threads=0,
  )  # fmt: skip
  batch = dict(next(data.batches()))
  batch['mask'] = np.array([1, 1, 1, 1, 1, 1, 0, 1], np.float32)
  batch = {name: jnp.asarray(values) for name, values in batch.items()}
  task = Pretraining(config_of(corpus), corpora.pretraining_source(corpus).info)
  shapes = jax.eval_shape(task.init, jax.random.key(0))[0]
  return task, batch, small.randomised(nn.unbox(shapes))


def test_loss_is_that_of_equation_8(case):
  task, batch, params = case
  run, keys = losses.of(task), jax.random.split(jax.random.key(0), 8)
  loss, metrics = run(params, batch, keys=keys)
  logits, out = task.apply(params, {}, batch, keys)
  words, order = (
    scipy.special.log_softmax(np.asarray(logits[name], np.float64), -1)
    for name in ('words', 'order')
  )
  cost = np.asarray(out['ponder']['cost'], np.float64)
  mlm, count, hits, sop, ponder = 0.0, 0, 0, 0.0, 0.0
  rows = np.flatnonzero(batch['mask'])
  for row in rows:
    for slot in np.flatnonzero(batch['mlm_weights'][row]):
      label = int(batch['mlm_labels'][row, slot])
      mlm -= words[row, slot, label]
      hits += words[row, slot].argmax() == label
      count += 1
    sop -= order[row, int(batch['label'][row])]
    ponder += cost[row].sum()
  mlm, sop, ponder = mlm / count, sop / len(rows), ponder / len(rows)
  want = mlm + 0.5 * sop + TAU * ponder
  np.testing.assert_allclose(loss, want, rtol=1e-5)
  values = compute(metrics)
  assert values['mlm_loss'] == pytest.approx(mlm, rel=1e-5)
  assert values['mlm_accuracy'] == pytest.approx(hits / count, abs=1e-6)
  assert values['sop_loss'] == pytest.approx(sop, rel=1e-5)
  assert values['ponder_cost'] == pytest.approx(ponder, rel=1e-5)
  share = TAU * ponder / want
  assert values['ponder_share'] == pytest.approx(share, rel=1e-5)
  other, _ = run(params, batch, {'ponder_weight': 1.0}, keys=keys)
  np.testing.assert_allclose(other, want + (1 - TAU) * ponder, rtol=1e-5)


def test_metrics_of_depth_are_those_of_the_real_tokens(case):
  task, batch, params = case
  metrics = compute(task.evaluate(params, {}, batch))
  _, out = task.apply(params, {}, batch)
  steps = np.asarray(out['ponder']['steps'])[np.asarray(batch['mask']) > 0]
  assert metrics['iterations'] == pytest.approx(steps[steps > 0].mean())
  assert metrics['iterations_all'] == pytest.approx(steps[steps > 0].mean())
  assert metrics['depth'] == pytest.approx(steps.max(1).mean())
  assert metrics['iterations_cls'] == pytest.approx(steps[:, 0].mean())


@pytest.mark.parametrize(
  ('field', 'value'), [('vocab_size', 5), ('max_positions', 31)]
)
def test_a_model_too_small_for_the_corpus_is_refused(corpus, field, value):
  info = corpora.pretraining_source(corpus).info
  config = config_of(corpus)
  config['model'] = {**config['model'], field: value}
  with pytest.raises(ConfigError, match=rf'model\.{field}: expected at least'):
    Pretraining(config, info)


def load(corpus, *overrides, **arguments):
  given = dict(corpus=corpus, variant='micro', length=32, steps=4)
  text = ','.join(f'{k}={v}' for k, v in (given | arguments).items())
  path = f'configs/albert_act/pretrain.py:{text}'
  return command_line.load_config(
    path, ['mesh.data=1', 'batch_size=8', *overrides]
  )


def test_the_shipped_configuration(corpus):
  config = load(corpus)
  assert config.model.vocab_size == len(corpora.VOCABULARY)
  assert config.loss.ponder_weight == pytest.approx(0.768 / (6 * 32))
  config_schema.validate(config)
  fixed = load(corpus, halting='fixed')
  assert fixed.model.rule.name == 'halting.token_rules:Fixed'
  assert fixed.loss.ponder_weight == 0.0
  # Arguments reach the loss and the schedule, at whose end training ends.
  for given, tau in (({}, 0.768 / (12 * 32)), ({'tau': 3e-3}, 3e-3)):
    config = load(corpus, iterations=12, tau_from=0.5, **given)
    assert config.model.max_iterations == 12
    assert config.loss.ponder_weight == pytest.approx(tau)
    knob = config.phases[1].knobs['ponder_weight']
    assert knob == ('linear', 0.0, config.loss.ponder_weight)
  bert = load(corpus, halting='bert', iterations=3)
  assert (bert.model.num_groups, bert.model.max_iterations) == (3, 3)
  # The paper's, for up to 12 iterations of 128 tokens.
  paper = command_line.load_config(
    f'configs/albert_act/pretrain.py:corpus={corpus}', []
  )
  assert paper.loss.ponder_weight == pytest.approx(5e-4)
  assert (paper.batch_size, paper.phases[0].steps) == (4096, 112_500)
  assert (paper.optimizer.name, paper.optimizer.lr) == ('lamb', 1.76e-3)
  data = paper.dataset
  assert (data.mask_share, data.max_ngram, data.max_length) == (0.2, 3, 128)


def test_the_corpus_is_found(tmp_path, corpus, monkeypatch):
  with pytest.raises(ConfigError, match=r'dataset\.directory: expected a corp'):
    load(tmp_path / 'nothing')
  monkeypatch.setenv('HOME', str(corpus.parent))
  config = load(f'~/{corpus.name}')
  assert config.model.vocab_size == len(corpora.VOCABULARY)


@pytest.mark.parametrize('share', [0.01, 0.99])
def test_no_stage_is_empty(share):
  path = f'configs/albert_act/pretrain.py:steps=20,tau_from={share}'
  with pytest.raises(command_line.UsageError, match='tau_from: expected a sha'):
    command_line.load_config(path, [])
