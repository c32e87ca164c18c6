"""Beginning from a Hugging Face ALBERT and from pretraining, by the configs."""

import jax
import numpy as np
import pytest

from dataset_lib import tokenizer
from dataset_lib.errors import ConfigError
from model_lib import convert
from tests.albert_act import tiny_run
from train_lib import build, config_schema, warm_start


def begun(config):
  """Returns the parameters at step 0 by top-level module."""
  config = config_schema.validate(config)
  built = build.build_setup(config)
  with jax.set_mesh(built.mesh):
    state = warm_start.start_from(built.init(), config.warm_start)
    return jax.device_get(state.params)


def glue(tmp_path_factory, start, **arguments):
  overrides = ['dataset.max_length=32']
  data = tiny_run.texts(tmp_path_factory)
  return tiny_run.load(
    'glue', overrides, task='sst2', data=data, batch=8, checkpoint=start,
    **arguments,
  )  # fmt: skip


def assert_begun_from(params, source, fresh):
  """All parameters are those of the source but for the fresh ones."""
  assert set(params) - set(source) <= fresh
  for name in set(params) - fresh:
    jax.tree.map(np.testing.assert_array_equal, params[name], source[name])
  for name in set(params) & set(source) & fresh:
    theirs = jax.tree.leaves(source[name])
    for ours, other in zip(jax.tree.leaves(params[name]), theirs, strict=True):
      assert not np.array_equal(ours, other)


@pytest.mark.nightly
@pytest.mark.parametrize('halting', ['act', 'fixed'])
def test_glue_from_hugging_face(tmp_path_factory, halting):
  start = tiny_run.hugging_face(tmp_path_factory)
  config = glue(tmp_path_factory, start, score='fresh', halting=halting)
  assert (config.model.width, config.model.max_iterations) == (16, 6)
  assert config.model.vocab_size == tiny_run.SIZES['vocab_size']
  assert config.dataset.tokenizer == str(start)
  params = begun(config)
  assert_begun_from(params, convert.load_params(start), {'head', 'score'})
  assert ('score' in params) == (halting == 'act')
  if halting == 'act':
    assert params['score']['bias'] == pytest.approx(-2.0)
    assert params['score']['kernel'].shape == (16, 1)


@pytest.mark.slow
def test_a_score_that_hugging_face_lacks_is_named(tmp_path_factory):
  start = tiny_run.hugging_face(tmp_path_factory)
  config = glue(tmp_path_factory, start)
  with pytest.raises(ConfigError, match='score/kernel') as error:
    begun(config)
  assert error.value.field == 'warm_start.workdir'


@pytest.mark.nightly
@pytest.mark.parametrize('halting', ['act', 'fixed'])
def test_pretraining_from_hugging_face(tmp_path_factory, halting):
  start = tiny_run.hugging_face(tmp_path_factory)
  sizes = convert.read_sizes(start)
  overrides = [f'model.{name}={size}' for name, size in sizes.items()]
  overrides.append(f'warm_start.workdir={start}')
  if halting == 'act':
    overrides.append('warm_start.skip=^score/')
  config = tiny_run.load(
    'pretrain', overrides, corpus=tiny_run.corpus(tmp_path_factory),
    variant='micro', length=tiny_run.LENGTH, batch=8, halting=halting,
  )  # fmt: skip
  source = convert.load_params(start, 'pretraining')
  assert {'predictions', 'sop'} < set(source)
  assert_begun_from(begun(config), source, {'score'})


@pytest.mark.slow
@pytest.mark.parametrize(
  ('arguments', 'fresh'),
  [
    ({}, {'head'}),
    (dict(score='fresh'), {'head', 'score'}),
    (dict(halting='fixed'), {'head'}),
  ],
)
def test_glue_from_pretraining(tmp_path_factory, arguments, fresh):
  start = tiny_run.made(tmp_path_factory, 'pretrain')
  config = glue(tmp_path_factory, start, **arguments)
  # Its words are those of the corpus.
  given = tokenizer.load(config.dataset.tokenizer)
  assert given.vocab_size == tiny_run.SIZES['vocab_size']
  source = tiny_run.parameters(tiny_run.AlbertPretraining)
  params = begun(config)
  assert_begun_from(params, source, fresh)
  assert ('score' in params) == ('halting' not in arguments)
