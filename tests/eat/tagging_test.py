"""Tags by an EAT: pruned tokens, loss and metrics in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from core.errors import ConfigError
from eat.tagging import EatTagger, Tagging
from tests import losses
from tests.eat import small
from tests.eat.model_test import reference

NAMES = ('B-PER', 'I-PER', 'O')
FIELDS = {k: v for k, v in small.FIELDS.items() if k != 'exit_layers'}


def tagger(**changes):
  """A tagger, the EAT with the same parameters, and those of both."""
  classifier, variables = small.build(restore=True, exit_layers=(), **changes)
  params = {k: v for k, v in variables['params'].items() if k != 'pooler'}
  return EatTagger(**(FIELDS | changes)), classifier, params


def case():
  """(task, batch with a row of padding, parameters)."""
  model, _, params = tagger()
  info = dataclasses.replace(small.info(), class_names=NAMES)
  task = small.task(Tagging, model, info, loss={'label_smoothing': 0.0})
  batch = small.labelled(small.batch(small.rows(8), 20), 3, 7)
  rng = np.random.default_rng(0)
  label = rng.integers(-1, 3, (8, 20))
  label[:, 0] = -1
  label[np.arange(20) >= np.asarray(batch['length'])[:, None]] = -1
  batch['label'] = jnp.asarray(label, jnp.int32)
  batch['left_out'] = jnp.arange(8, dtype=jnp.int32)
  return task, batch, params


def test_a_pruned_token_is_tagged_by_its_state_when_it_was_pruned():
  model, classifier, params = tagger(window=0)
  texts = small.rows(3)
  logits, out = jax.jit(model.apply)(
    {'params': params}, *small.batch(texts, 24)
  )
  variables = small.build(restore=True, exit_layers=(), window=0)[1]
  head = params['head']
  for index, text in enumerate(texts):
    *_, positions, full = reference(classifier, variables, text)
    assert len(positions) < len(text)
    expected = full @ head['kernel'] + head['bias'][None]
    got = logits[index, : len(text)]
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert out['kept'][-1][index] == len(positions)


@pytest.mark.slow
def test_loss_and_metrics_in_numpy():
  task, batch, params = case()
  loss, metrics = losses.of(task)(params, batch)
  logits, out = jax.jit(task.apply)(params, {}, batch)
  logits, label = (np.asarray(x)[:7] for x in (logits, batch['label']))
  at = np.nonzero(label >= 0)
  entropy = -log_softmax(np.float64(logits), -1)[(*at, label[at])]
  np.testing.assert_allclose(loss, entropy.mean(), rtol=1e-5)
  found = {name: metric.compute() for name, metric in metrics.items()}
  assert set(found) == {
    'accuracy', 'cross_entropy', 'retention', 'span_f1', 'words_left_out'
  }  # fmt: skip
  correct = logits.argmax(-1)[at] == label[at]
  np.testing.assert_allclose(found['accuracy'], correct.mean(), rtol=1e-6)
  np.testing.assert_allclose(found['cross_entropy'], loss, rtol=1e-6)
  # 0 + 1 + ... + 6 words, beside those with a token.
  expected = 21 / (21 + len(entropy))
  np.testing.assert_allclose(found['words_left_out'], expected, rtol=1e-6)
  share = (out['kept'][-1] / batch['length'])[:7].mean()
  np.testing.assert_allclose(found['retention'], share, rtol=1e-6)
  evaluated = jax.jit(task.evaluate)(params, {}, batch)
  assert evaluated['span_f1'].compute() == found['span_f1']


def test_without_a_tag_there_is_no_loss():
  task, batch, params = case()
  empty = batch | {'label': jnp.full((8, 20), -1)}
  assert losses.of(task)(params, empty)[0] == 0.0


def test_parts_of_speech_have_no_spans_and_nothing_is_served():
  task, batch, params = case()
  task.info = dataclasses.replace(task.info, class_names=('ADJ', 'NOUN', 'X'))
  assert 'span_f1' not in jax.eval_shape(task.evaluate, params, {}, batch)
  with pytest.raises(ConfigError, match='task: expected a task with one label'):
    task.serve({'params': params}, {})
