"""From a run's directory to an engine in one line."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataset_lib.errors import ConfigError
from eat import exits, loading
from launch import evaluate
from serve_lib.engine import Engine
from tests.eat import tiny_run
from train_lib import loading as runs
from train_lib import sharding

TEXTS = ['good film', 'the film was bad', 'a bad bad bad film']


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  return tiny_run.train(tmp_path_factory)


def last_head(run, policy, texts):
  """Probabilities by a plain call of the model with the run's parameters."""
  task = runs.load_task(run, runs.load_config(run))
  mesh = sharding.make_mesh({'data': 1})
  with jax.set_mesh(mesh):
    variables = runs.load_params(run, task, mesh).variables
  encoded = [policy.encode(text) for text in texts]
  tokens = np.zeros((len(texts), 16), np.int32)
  for row, one in zip(tokens, encoded, strict=True):
    row[: one.length] = one.inputs['tokens']
  lengths = jnp.asarray([one.length for one in encoded])
  logits, _ = jax.jit(task.model.apply)(
    variables, jnp.asarray(tokens), jnp.zeros((len(texts), 16), int), lengths
  )
  return exits.softmax(np.asarray(logits))


def test_the_example_of_the_docstring(run):
  chain, policy, lengths = loading.load(run, options={'rule': 'never'})
  assert lengths == (8, 16)
  with Engine(chain, policy, lengths[:1], (4,)) as engine:
    answers = engine.predict(TEXTS)
  expected = last_head(run, policy, TEXTS)
  for answer, row in zip(answers, expected, strict=True):
    got = list(answer.probabilities.values())
    np.testing.assert_allclose(got, row, atol=1e-5)
    assert answer.exit_reason == 'last layer'
    assert not answer.truncated


def test_a_run_outlives_what_it_started_from(run, tmp_path, capsys):
  workdir = tmp_path / 'run'
  shutil.copytree(run, workdir)
  config = json.loads((workdir / 'config.json').read_text())
  config['warm_start']['workdir'] = config['loss']['teacher'] = '/gone'
  config['dataset']['tokenizer'] = '/gone/tokenizer.json'
  config['evals'] = {'dev': {'type': 'glue', 'split': 'validation'}}
  (workdir / 'config.json').write_text(json.dumps(config))
  assert evaluate.main([f'--workdir={workdir}']) == 0
  assert 'dev/accuracy' in capsys.readouterr().out
  assert loading.load(workdir).lengths == (8, 16)


def test_texts_are_cut_off_at_the_longest_bucket_and_say_so(run):
  assert loading.load(run, lengths=(12, 6)).lengths == (6, 12)
  loaded = loading.load(run, lengths=(12,))
  with Engine(*loaded, batches=(2,)) as engine:
    short, long = engine.predict(['good film', 'bad ' * 11])
  assert not short.truncated
  assert long.truncated
  assert loaded.policy.encode('bad ' * 11).length == 12


@pytest.fixture
def unread(monkeypatch):
  """No model may be built or read."""

  def refuse(*_):
    raise AssertionError('the model was read')

  monkeypatch.setattr(runs, 'load_task', refuse)


@pytest.mark.parametrize(
  ('arguments', 'key', 'expected'),
  [
    (dict(lengths=(8, 32)), 'lengths', 'from 1 to 16, the longest row'),
    (dict(lengths=(4,)), 'lengths', 'the longest at least 5'),
    (dict(lengths=(0, 16)), 'lengths', 'from 1 to 16'),
    (dict(lengths=()), 'lengths', 'from 1 to 16'),
    (dict(lengths=(8,), options={'tau': 'guaranteed'}),
     'lengths', '16 among them'),
    (dict(options={'tau': 2.0}), 'serve.tau', '[0, 1]'),
    (dict(options={'rule': 'entropy'}), 'serve.tau', '[0, 0.6931)'),
    (dict(options={'rule': 'entropy', 'tau': 0.9}), 'serve.tau', '[0, 0.6931)'),
    (dict(thresholds={'forum': 2.0}), 'thresholds.forum', '[0, 1]'),
    (dict(minimum_retention={'forum': 2.0}), 'minimum_retention.forum', ''),
  ],
)  # fmt: skip
def test_wrong_arguments_are_answered_at_once(
  run, unread, arguments, key, expected
):
  with pytest.raises(ConfigError) as error:
    loading.load(run, **arguments)
  assert error.value.field == key
  assert expected in error.value.expected


def test_a_directory_without_a_run(tmp_path):
  with pytest.raises(ConfigError, match='workdir: expected the directory of'):
    loading.load(tmp_path)
