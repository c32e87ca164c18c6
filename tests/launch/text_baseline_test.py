"""Embeddings and the regression of the baseline against a plain loop."""

import functools

import jax
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from dataset_lib import builder
from launch import export, text_baseline, train
from tests.launch import classify_test
from tests.launch.toy_runs import SMALL, SPECIAL, WORDS
from train_lib import loading


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A dense run of two steps, and its weights as a published model."""
  root = tmp_path_factory.mktemp('baseline')
  (root / 'vocab.txt').write_text('\n'.join([*SPECIAL, *WORDS]))
  classify_test.write_rows(root / 'tickets.csv', 0)
  config = (
    f'configs/texts.py:data={root}/tickets.csv,text=body,label=category,'
    f'variant=tiny,vocabulary={root}'
  )
  steps = 'phases.0.epochs=0', 'phases.0.steps=2', 'phases.0.least_steps=0'
  changes = [f'--config.{change}' for change in (*SMALL, *steps, 'evals={}')]
  train.main([f'--config={config}', f'--workdir={root}/run', *changes])
  export.main([f'--workdir={root}/run', f'--out={root}/hf'])
  return root


def by_a_loop(folder, split):
  """Means of the last states of rows alone, of length 1, and labels."""
  config = loading.load_config(folder / 'run')
  run = loading.restore(folder / 'run', config)
  source = builder.build_source(config.dataset, split)
  encode = jax.jit(
    functools.partial(run.task.model.apply, run.variables, method='encode')
  )
  rows, labels = [], []
  for number in range(len(source)):
    row = source.records(np.array([number]))
    length = int(row['length'][0])
    inputs = row['tokens'][:, :length], row['token_types'][:, :length]
    states = np.asarray(encode(*inputs, row['length']), np.float64)
    mean = states[0].mean(0)
    rows.append(mean / np.linalg.norm(mean))
    labels.append(int(row['label'][0]))
  return np.array(rows), np.array(labels)


def test_embeddings_are_means_and_the_strength_is_chosen_on_validation(folder):
  run, published = str(folder / 'run'), str(folder / 'hf')
  config = loading.load_config(run)
  embed = text_baseline._encoder(config, run, published)
  expected = {name: by_a_loop(folder, name) for name in classify_test.SPLITS}
  for split, (rows, labels) in expected.items():
    found = embed(split)
    np.testing.assert_allclose(found[0], rows, atol=1e-5)
    np.testing.assert_array_equal(found[1], labels)
  best, score = None, -1.0
  for strength in text_baseline.STRENGTHS:
    model = LogisticRegression(C=strength, max_iter=1000)
    model.fit(*expected['train'])
    if (new := model.score(*expected['validation'])) > score:
      best, score = model, new
  found = text_baseline.accuracy(run, published)
  assert found == pytest.approx(best.score(*expected['test']))
