"""Warm start: explicit renames, and every leftover is listed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from model_lib import bert, convert, sizes
from tests.model_lib import plain
from tests.train_lib.states import mesh_of, save_all
from train_lib.loading import warm_start

KERNEL = jnp.arange(16.0).reshape(4, 4)
SAVED = {
  'encoder': {'kernel': KERNEL, 'bias': jnp.arange(4.0)},
  'head': {'kernel': jnp.ones((4, 10))},
}


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  directory = tmp_path_factory.mktemp('old_run')
  state = {'params': SAVED, 'opt_state': jnp.ones(3)}
  save_all(directory / 'checkpoints', [9], lambda _: state)
  return directory


def fresh(encoder='encoder', classes=10, dtype=jnp.float32, **more):
  return {
    encoder: {'kernel': jnp.zeros((4, 4), dtype), 'bias': jnp.zeros(4)},
    'head': {'kernel': jnp.full((4, classes), 7.0)},
    **more,
  }


def assert_trees_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def placed(params, devices):
  where = NamedSharding(mesh_of(devices), PartitionSpec())
  return jax.device_put(params, where), where


@pytest.mark.parametrize('folder', ['', 'checkpoints'])
def test_replaces_all_parameters_and_keeps_the_sharding(workdir, folder):
  params, where = placed(fresh(), 4)
  started = warm_start(params, workdir / folder)
  assert_trees_equal(started, SAVED)
  assert all(leaf.sharding == where for leaf in jax.tree.leaves(started))


def test_renames_are_applied_in_turn_to_the_names_of_the_checkpoint(workdir):
  renames = (r'^enc(\w+)->trunk_\1', '^trunk_oder->backbone')
  started = warm_start(fresh('backbone'), workdir, renames)
  assert_trees_equal(started['backbone'], SAVED['encoder'])


def test_skipped_parameters_stay_fresh(workdir):
  params = fresh(classes=3, tape={'query': jnp.full((2,), 5.0)})
  started = warm_start(params, workdir, skip=('^head/', '^tape/'))
  assert_trees_equal(started, params | {'encoder': SAVED['encoder']})


@pytest.mark.parametrize(
  ('params', 'renames', 'skip', 'messages'),
  [
    (
      fresh('backbone', classes=3), (), (),
      [
        'backbone/bias: expected float32[4], got nothing',
        'backbone/kernel: expected float32[4, 4], got nothing',
        'encoder/bias: expected nothing, got float32[4]',
        'head/kernel: expected float32[4, 3], got float32[4, 10]',
        'warm_start.skip=', 'warm_start.renames=', 'old_run',
      ],
    ),
    (
      fresh(dtype=jnp.bfloat16), (), (),
      ['expected bfloat16[4, 4], got float32[4, 4]'],
    ),
    (fresh(), ('encodr->x',), (), ['encodr->x', 'match no parameter']),
    (fresh(), (), ('haed',), ['haed', 'match no parameter']),
    (fresh(), ('kernel->bias',), (), ["become 'encoder/bias'"]),
  ],
)  # fmt: skip
def test_what_does_not_fit_is_listed(workdir, params, renames, skip, messages):
  with pytest.raises(ValueError, match='warm_start') as error:
    warm_start(params, workdir, renames, skip)
  for message in messages:
    assert message in str(error.value)


BERT = sizes.BERT.defaults | dict(
  width=8, depth=1, mlp_dim=12, num_heads=2, vocab_size=10, max_positions=8
)


def bert_params(seed, num_classes=2):
  model = bert.BertClassifier(num_classes=num_classes, **BERT)
  row = jnp.zeros((1, 4), jnp.int32)
  params = plain.noise(model, row, row, row[0, :1], seed=seed)
  return jax.tree.map(jnp.asarray, params)


@pytest.fixture(scope='module')
def pretrained(tmp_path_factory):
  """A Hugging Face directory and what is in it."""
  directory = tmp_path_factory.mktemp('pretrained')
  params = bert_params(0)
  convert.save(directory, 'bert', BERT, params)
  return directory, params


def test_replaces_by_a_hugging_face_model_and_keeps_the_sharding(pretrained):
  directory, params = pretrained
  begun, where = placed(bert_params(1), 2)
  started = warm_start(begun, directory)
  assert_trees_equal(started, params)
  assert all(leaf.sharding == where for leaf in jax.tree.leaves(started))
  begun['neck'] = begun.pop('pooler')
  started = warm_start(begun, directory, renames=('^pooler/->neck/',))
  assert_trees_equal(started['neck'], params['pooler'])


def test_a_head_of_another_task_is_skipped_explicitly(pretrained):
  directory, params = pretrained
  fresh = bert_params(1, num_classes=3) | {'exit_1': {'bias': jnp.ones(3)}}
  message = r'exit_1/bias: expected float32\[3\], got nothing'
  with pytest.raises(ValueError, match=message) as error:
    warm_start(fresh, directory)
  other = 'head/kernel: expected float32[8, 3], got float32[8, 2]'
  assert other in str(error.value)
  started = warm_start(fresh, directory, skip=('^head/', '^exit_'))
  same = {name: fresh[name] for name in ('head', 'exit_1')}
  assert_trees_equal(started, params | same)
