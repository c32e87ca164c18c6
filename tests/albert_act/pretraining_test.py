"""The pretraining objective against plain sums; a run from raw text."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
from flax import linen as nn

from albert_act.pretraining import Pretraining
from dataset_lib import builder
from dataset_lib.errors import ConfigError
from eval_lib.metrics import compute
from launch import command_line, config_flags
from tests.albert_act import small
from tests.dataset_lib import corpora
from train_lib import config_schema, trainer
from train_lib.train_step import init_state, make_train_step

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
def task(corpus):
  info = corpora.pretraining_source(corpus).info
  return Pretraining(config_of(corpus), info)


@pytest.fixture(scope='module')
def batch(corpus):
  data = builder.build(
    corpora.pretraining_config(corpus), split='train', train=True, seed=3,
    batch_size=8, num_threads=0,
  )  # fmt: skip
  batch = dict(next(data.batches()))
  batch['mask'] = np.array([1, 1, 1, 1, 1, 1, 0, 1], np.float32)
  return {name: jnp.asarray(values) for name, values in batch.items()}


@pytest.fixture(scope='module')
def params(task):
  shapes = jax.eval_shape(task.init, jax.random.key(0))[0]
  return small.randomised(nn.unbox(shapes))


def keys(rows):
  return jax.random.split(jax.random.key(0), rows)


def test_loss_is_that_of_equation_8(task, batch, params):
  norm = task.normalizers(batch)
  loss, (metrics, _) = jax.jit(task.loss)(
    params, {}, {}, batch, norm, keys(8), {}
  )
  logits, out = task.apply(params, batch, keys(8))
  words = scipy.special.log_softmax(np.asarray(logits['words'], np.float64), -1)
  order = scipy.special.log_softmax(np.asarray(logits['order'], np.float64), -1)
  cost = np.asarray(out['encoded'].ponder['cost'], np.float64)
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
  want = mlm / count + 0.5 * sop / len(rows) + TAU * ponder / len(rows)
  np.testing.assert_allclose(loss, want, rtol=1e-5)
  values = compute(metrics)
  assert values['mlm_loss'] == pytest.approx(mlm / count, rel=1e-5)
  assert values['mlm_accuracy'] == pytest.approx(hits / count, abs=1e-6)
  assert values['sop_loss'] == pytest.approx(sop / len(rows), rel=1e-5)
  assert values['ponder_cost'] == pytest.approx(ponder / len(rows), rel=1e-5)


@pytest.mark.nightly
def test_a_knob_overrides_tau(task, batch, params):
  norm = task.normalizers(batch)

  def loss(**knobs):
    knobs = {name: jnp.float32(value) for name, value in knobs.items()}
    return task.loss(params, {}, {}, batch, norm, keys(8), knobs)[0]

  cost = (loss(ponder_weight=1.0) - loss(ponder_weight=0.0)).item()
  np.testing.assert_allclose(loss() - loss(ponder_weight=0.0), TAU * cost,
                             rtol=1e-3)  # fmt: skip


def test_metrics_of_depth_are_those_of_the_real_tokens(task, batch, params):
  metrics = compute(task.evaluate(params, {}, batch))
  _, out = task.apply(params, batch)
  steps = np.asarray(out['encoded'].ponder['steps'])[
    np.asarray(batch['mask']) > 0
  ]
  assert metrics['iterations'] == pytest.approx(steps[steps > 0].mean())
  assert metrics['iterations_all'] == pytest.approx(steps[steps > 0].mean())
  assert metrics['depth'] == pytest.approx(steps.max(1).mean())
  assert metrics['iterations_cls'] == pytest.approx(steps[:, 0].mean())


@pytest.mark.slow
def test_micro_batches_add_exactly(task, batch):
  # Rows have different numbers of masked words: a mean of means would differ.
  def train(num_micro):
    optimizer = optax.sgd(0.1)
    step = jax.jit(
      make_train_step(
        task, optimizer, optax.constant_schedule(0.1), num_micro=num_micro
      )
    )
    state = nn.unbox(init_state(task, optimizer, 0, 0.0))
    return step(state, {}, batch, {})

  (state, metrics), (other, others) = train(1), train(4)
  np.testing.assert_allclose(
    metrics['loss'].total, others['loss'].total, rtol=1e-5
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
    state.params,
    other.params,
  )


@pytest.mark.parametrize(
  ('changes', 'key'),
  [
    (dict(loss=dict(ponder_weight=-1.0)), 'loss.ponder_weight'),
    (dict(loss=dict(tau=0.1)), 'loss.tau'),
    (dict(model=MODEL | {'vocab_size': 10, 'num_heads': 0}), 'model.num_heads'),
    (dict(model=dict(name='model_lib.bert:BertClassifier', variant='tiny')),
     'model.name'),
  ],
)  # fmt: skip
def test_illegal_fields_are_named(corpus, changes, key):
  with pytest.raises(ConfigError) as caught:
    Pretraining.validate_config(config_of(corpus, **changes))
  assert caught.value.field == key


@pytest.mark.parametrize(
  ('field', 'value'), [('vocab_size', 5), ('max_positions', 31)]
)
def test_a_model_too_small_for_the_corpus_is_refused(corpus, field, value):
  info = corpora.pretraining_source(corpus).info
  config = config_of(corpus)
  config['model'] = config['model'] | {field: value}
  with pytest.raises(ConfigError, match=rf'model\.{field}: expected at least'):
    Pretraining(config, info)


def load(corpus, repository, *overrides, **arguments):
  given = dict(corpus=corpus, variant='micro', length=32, steps=4)
  text = ','.join(f'{k}={v}' for k, v in (given | arguments).items())
  path = f'{repository}/configs/albert_act/pretrain.py:{text}'
  return config_flags.load_config(
    path, ['mesh.data=1', 'batch_size=8', *overrides]
  )


def test_the_shipped_configuration(corpus, repository):
  config = load(corpus, repository)
  assert config.model.vocab_size == len(corpora.VOCABULARY)
  assert config.loss.ponder_weight == pytest.approx(0.768 / (6 * 32))
  config_schema.validate(config)
  fixed = load(corpus, repository, halting='fixed')
  assert (fixed.model.halting, fixed.loss.ponder_weight) == ('', 0.0)
  # The paper's, for up to 12 iterations of 128 tokens.
  paper = config_flags.load_config(
    f'{repository}/configs/albert_act/pretrain.py:corpus={corpus}', []
  )
  assert paper.loss.ponder_weight == pytest.approx(5e-4)
  assert (paper.batch_size, paper.stages.stage1.steps) == (4096, 112_500)
  assert (paper.optimizer.name, paper.optimizer.lr) == ('lamb', 1.76e-3)
  data = paper.dataset
  assert (data.mask_share, data.max_ngram, data.max_length) == (0.2, 3, 128)


def test_the_corpus_is_found(tmp_path, corpus, repository, monkeypatch):
  with pytest.raises(ConfigError, match=r'dataset\.directory: expected a corp'):
    load(tmp_path / 'nothing', repository)
  monkeypatch.setenv('HOME', str(corpus.parent))
  config = load(f'~/{corpus.name}', repository)
  assert config.model.vocab_size == len(corpora.VOCABULARY)


@pytest.mark.parametrize('arguments', ['steps=20,tau_from=0.01',
                                       'steps=20,tau_from=0.99'])  # fmt: skip
def test_no_stage_is_empty(repository, arguments):
  path = f'{repository}/configs/albert_act/pretrain.py:{arguments}'
  with pytest.raises(command_line.UsageError, match='tau_from: expected a sha'):
    config_flags.load_config(path, [])


@pytest.mark.slow
def test_a_run_from_raw_text(corpus, repository, tmp_path):
  config = load(
    corpus, repository, 'tensorboard=false', 'loader.num_threads=1',
    'model.width=16', 'model.embedding_width=8', 'model.mlp_dim=24',
    'model.num_heads=2', 'evals.dev.every_steps=0', 'log_every=1',
    'optimizer.name=adamw', 'optimizer.lr=0.01', steps=60,
  )  # fmt: skip
  config_schema.validate(config)
  with jax.numpy_dtype_promotion('standard'):  # optax casts
    trainer.train(config, str(tmp_path / 'run'))
  result = json.loads((tmp_path / 'run' / 'result.json').read_text())
  for name in ('mlm_accuracy', 'sop_accuracy', 'iterations_cls', 'depth'):
    assert f'dev/{name}' in result
  lines = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
  losses = [json.loads(line).get('train/mlm_loss') for line in lines]
  losses = [loss for loss in losses if loss is not None]
  assert losses[-1] < losses[0] - 0.2
  assert (tmp_path / 'run' / 'tokenizer.json').is_file()
