"""Beginning from a Hugging Face ALBERT and from pretraining, by the configs."""

import jax
import numpy as np
import pytest

from dataset_lib import tokenizer
from dataset_lib.errors import ConfigError
from model_lib import convert
from tests.albert_act import tiny_run
from train_lib import build, config_schema, loading


def begun(config):
  """Returns the parameters at step 0 by top-level module."""
  config = config_schema.validate(config)
  built = build.Setup(config)
  with jax.set_mesh(built.mesh):
    state = loading.start_from(built.init(), config.warm_start)
    return jax.device_get(state.params)


def load(tmp_path_factory, name, start, **arguments):
  """The configuration of this name that begins from `start`."""
  if name == 'glue':
    data = tiny_run.texts(tmp_path_factory)
    return tiny_run.load(
      'glue', ['dataset.max_length=32'], task='sst2', data=data, batch=8,
      checkpoint=start, **arguments,
    )  # fmt: skip
  sizes = convert.read_sizes(start)
  overrides = [f'model.{name}={size}' for name, size in sizes.items()]
  overrides.append(f'warm_start.workdir={start}')
  if arguments['halting'] == 'act':
    overrides.append('warm_start.skip=^score/')
  return tiny_run.load(
    'pretrain', overrides, corpus=tiny_run.corpus(tmp_path_factory),
    variant='micro', length=tiny_run.LENGTH, batch=8, **arguments,
  )  # fmt: skip


def case(start, name, fresh, mark, **arguments):
  return pytest.param(start, name, set(fresh), arguments, marks=mark)


SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly


@pytest.mark.parametrize(
  ('start', 'name', 'fresh', 'arguments'),
  [
    case('pretraining', 'glue', ['head'], SLOW),
    case('pretraining', 'glue', ['head', 'score'], SLOW, score='fresh'),
    case('pretraining', 'glue', ['head'], SLOW, halting='fixed'),
    case('hugging_face', 'glue', ['head', 'score'], NIGHTLY, score='fresh'),
    case('hugging_face', 'glue', ['head'], NIGHTLY, halting='fixed'),
    case('hugging_face', 'pretrain', ['score'], NIGHTLY, halting='act'),
    case('hugging_face', 'pretrain', [], NIGHTLY, halting='fixed'),
  ],
)
def test_parameters_are_those_of_the_start_but_for_the_fresh_ones(
  start, name, fresh, arguments, tmp_path_factory
):
  if start == 'hugging_face':
    path = tiny_run.hugging_face(tmp_path_factory)
    source = convert.load(path, *['pretraining'] * (name == 'pretrain')).params
  else:
    path = tiny_run.made(tmp_path_factory, 'pretrain')
    source = tiny_run.parameters(tiny_run.AlbertPretraining)
  config = load(tmp_path_factory, name, path, **arguments)
  # The words of `glue` are those of the start.
  assert config.model.vocab_size == tiny_run.SIZES['vocab_size']
  if name == 'glue':
    given = tokenizer.load(config.dataset.tokenizer)
    assert given.vocab_size == tiny_run.SIZES['vocab_size']
  params = begun(config)
  assert ('score' in params) == (arguments.get('halting') != 'fixed')
  assert set(params) - set(source) <= fresh <= set(params)
  for key in set(params) - fresh:
    jax.tree.map(np.testing.assert_array_equal, params[key], source[key])
  for key in fresh & set(source):
    theirs = jax.tree.leaves(source[key])
    for ours, other in zip(jax.tree.leaves(params[key]), theirs, strict=True):
      assert not np.array_equal(ours, other)
  if name == 'glue' and 'score' in fresh:
    assert params['score']['bias'] == pytest.approx(-2.0)


@pytest.mark.slow
def test_a_score_that_hugging_face_lacks_is_named(tmp_path_factory):
  start = tiny_run.hugging_face(tmp_path_factory)
  config = load(tmp_path_factory, 'glue', start)
  with pytest.raises(ConfigError, match='score/kernel') as error:
    begun(config)
  assert error.value.field == 'warm_start.workdir'
