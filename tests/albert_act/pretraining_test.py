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

FIELDS = {k: v for k, v in small.FIELDS.items() if k != 'vocab_size'}
MODEL = dict(
  name='albert_act.model:AlbertPretraining', vocab_size=0,
  classifier_dropout=0.0, **FIELDS | {'max_positions': 32},
)  # fmt: skip
TAU = 0.01
PATH = 'configs/albert_act/pretrain.py:variant=micro,corpus='


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
  logits, out = jax.jit(task.apply)(params, {}, batch, keys)
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
  metrics = compute(jax.jit(task.evaluate)(params, {}, batch))
  _, out = jax.jit(task.apply)(params, {}, batch)
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


def test_the_corpus_is_found(tmp_path, corpus, monkeypatch):
  with pytest.raises(ConfigError, match=r'dataset\.directory: expected a corp'):
    command_line.load_config(PATH + str(tmp_path / 'nothing'), [])
  monkeypatch.setenv('HOME', str(corpus.parent))
  config = command_line.load_config(f'{PATH}~/{corpus.name}', [])
  assert config.model.vocab_size == len(corpora.VOCABULARY)
