"""Warm start: explicit renames, and every leftover is listed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from model_lib import bert, convert, sizes
from train_lib.checkpoint import Checkpointer
from train_lib.warm_start import warm_start

SAVED = {
  'encoder': {
    'kernel': jnp.arange(16.0).reshape(4, 4),
    'bias': jnp.arange(4.0),
  },
  'head': {'kernel': jnp.ones((4, 10))},
}


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  directory = tmp_path_factory.mktemp('old_run')
  with Checkpointer(directory / 'checkpoints') as checkpointer:
    checkpointer.save(9, {'params': SAVED, 'opt_state': jnp.ones(3)})
  return directory


def fresh(encoder='encoder', classes=10, dtype=jnp.float32, **more):
  return {
    encoder: {
      'kernel': jnp.zeros((4, 4), dtype),
      'bias': jnp.zeros(4),
    },
    'head': {'kernel': jnp.full((4, classes), 7.0)},
    **more,
  }


def assert_trees_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def sharded(params, devices):
  """The parameters on a mesh, and their sharding."""
  mesh = jax.make_mesh((devices,), ('d',), axis_types=(AxisType.Auto,),
                       devices=jax.devices()[:devices])  # fmt: skip
  where = NamedSharding(mesh, PartitionSpec())
  return jax.device_put(params, where), where


def test_replaces_all_parameters_and_keeps_the_sharding(workdir):
  params, where = sharded(fresh(), 4)
  started = warm_start(params, workdir)
  assert_trees_equal(started, SAVED)
  assert all(leaf.sharding == where for leaf in jax.tree.leaves(started))
  assert_trees_equal(warm_start(fresh(), workdir / 'checkpoints'), SAVED)


def test_takes_the_average_if_there_is_one(tmp_path):
  state = {'params': SAVED, 'ema_params': jax.tree.map(jnp.cos, SAVED)}
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, state)
  assert_trees_equal(warm_start(fresh(), tmp_path), state['ema_params'])


def test_renames_are_applied_in_turn_to_the_names_of_the_checkpoint(workdir):
  started = warm_start(
    fresh('backbone'),
    workdir,
    (r'^enc(\w+)->trunk_\1', '^trunk_oder->backbone'),
  )
  assert_trees_equal(started['backbone'], SAVED['encoder'])


def test_skipped_parameters_stay_fresh(workdir):
  params = fresh(classes=3, tape={'query': jnp.full((2,), 5.0)})
  started = warm_start(params, workdir, skip=('^head/', '^tape/'))
  assert_trees_equal(started['encoder'], SAVED['encoder'])
  assert_trees_equal(started['head'], params['head'])
  assert_trees_equal(started['tape'], params['tape'])


def test_everything_unmatched_is_listed_with_the_option_that_skips_it(workdir):
  params = fresh('backbone', classes=3)
  with pytest.raises(ValueError, match='warm_start') as error:
    warm_start(params, workdir)
  for part in (
    'backbone/bias: expected float32[4], got nothing',
    'backbone/kernel: expected float32[4, 4], got nothing',
    'encoder/bias: expected nothing, got float32[4]',
    'head/kernel: expected float32[4, 3], got float32[4, 10]',
    'warm_start.skip=',
    'warm_start.renames=',
    str(workdir),
  ):
    assert part in str(error.value)


def test_a_dtype_is_not_cast(workdir):
  with pytest.raises(ValueError, match=r'expected bfloat16\[4, 4\], got float'):
    warm_start(fresh(dtype=jnp.bfloat16), workdir)


@pytest.mark.parametrize(
  ('renames', 'skip', 'message'),
  [
    (('encoder',), (), "expected 'old->new', got 'encoder'"),
    (('->x',), (), "expected 'old->new'"),
    (('encodr->x',), (), 'encodr->x.*match no parameter'),
    ((), ('haed',), 'haed.*match no parameter'),
    (('kernel->bias',), (), "become 'encoder/bias'"),
  ],
)
def test_mistakes_in_options_are_errors(workdir, renames, skip, message):
  with pytest.raises(ValueError, match=message):
    warm_start(fresh(), workdir, renames, skip)


BERT = sizes.BERT.defaults | {
  'width': 8,
  'depth': 1,
  'mlp_dim': 12,
  'num_heads': 2,
  'vocab_size': 10,
  'max_positions': 8,
}


def bert_params(seed, num_classes=2):
  model = bert.BertClassifier(num_classes=num_classes, **BERT)
  row, length = jnp.zeros((1, 4), jnp.int32), jnp.full(1, 4)
  shapes = jax.eval_shape(model.init, jax.random.key(0), row, row, length)
  generator = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: jnp.asarray(generator.normal(size=leaf.shape), leaf.dtype),
    nn.unbox(shapes['params']),
  )


@pytest.fixture(scope='module')
def pretrained(tmp_path_factory):
  """A Hugging Face directory and what is in it."""
  directory = tmp_path_factory.mktemp('pretrained')
  params = bert_params(0)
  convert.save(directory, 'bert', BERT, params)
  return directory, params


def rewrite(directory, target, change):
  """A copy of the checkpoint with other tensors."""
  path = directory / convert.WEIGHTS
  tensors = change(safetensors.numpy.load_file(path))
  safetensors.numpy.save_file(tensors, target / convert.WEIGHTS)
  (target / 'config.json').write_bytes((directory / 'config.json').read_bytes())


def test_replaces_by_a_hugging_face_model_and_keeps_the_sharding(pretrained):
  directory, params = pretrained
  begun, where = sharded(bert_params(1), 2)
  started = warm_start(begun, directory)
  assert_trees_equal(started, params)
  assert jax.tree.structure(started) == jax.tree.structure(params)
  assert all(leaf.sharding == where for leaf in jax.tree.leaves(started))


def test_a_head_of_another_task_is_skipped_explicitly(pretrained):
  directory, params = pretrained
  fresh = bert_params(1, num_classes=3) | {'exit_1': {'bias': jnp.ones(3)}}
  message = r'exit_1/bias: expected float32\[3\], got nothing'
  with pytest.raises(ValueError, match=message) as error:
    warm_start(fresh, directory)
  assert 'head/kernel: expected float32[8, 3], got float32[8, 2]' in str(
    error.value
  )
  started = warm_start(fresh, directory, skip=('^head/', '^exit_'))
  for name in fresh:
    taken = name not in ('head', 'exit_1')
    assert_trees_equal(started[name], (params if taken else fresh)[name])


def test_a_bare_encoder_lacks_pooler_and_head(pretrained, tmp_path):
  directory, params = pretrained
  rewrite(
    directory,
    tmp_path,
    lambda tensors: {
      name.removeprefix('bert.'): tensor
      for name, tensor in tensors.items()
      if 'pooler' not in name and 'classifier' not in name
    },
  )
  fresh = bert_params(1)
  with pytest.raises(ValueError, match=r'pooler/bias: expected.*got nothing'):
    warm_start(fresh, tmp_path, skip=('^head/',))
  started = warm_start(fresh, tmp_path, skip=('^head/', '^pooler/'))
  assert_trees_equal(started['pooler'], fresh['pooler'])
  assert_trees_equal(started['block_0'], params['block_0'])


def test_half_precision_is_cast_and_said(pretrained, tmp_path, caplog):
  directory, params = pretrained
  rewrite(
    directory,
    tmp_path,
    lambda tensors: {
      name: tensor.astype(np.float16) for name, tensor in tensors.items()
    },
  )
  with caplog.at_level('INFO', logger='absl'):
    started = warm_start(bert_params(1), tmp_path)
  assert "cast: ('float16',)" in caplog.text
  jax.tree.map(
    lambda got, want: np.testing.assert_array_equal(
      got, np.asarray(want).astype(np.float16).astype(np.float32)
    ),
    started,
    params,
  )
  assert {leaf.dtype for leaf in jax.tree.leaves(started)} == {
    jnp.dtype('float32')
  }


def test_renames_apply_to_the_names_of_our_tree(pretrained):
  directory, params = pretrained
  fresh = bert_params(1)
  fresh['neck'] = fresh.pop('pooler')
  started = warm_start(fresh, directory, renames=('^pooler/->neck/',))
  assert_trees_equal(started['neck'], params['pooler'])


def test_an_unusable_hugging_face_model_is_explained(pretrained, tmp_path):
  directory, _ = pretrained
  rewrite(directory, tmp_path, lambda tensors: tensors)
  path = tmp_path / 'config.json'
  config = json.loads(path.read_text())
  path.write_text(json.dumps(config | {'is_decoder': True}))
  with pytest.raises(ValueError, match='is_decoder: expected False'):
    warm_start(bert_params(1), tmp_path)
