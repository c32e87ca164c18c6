"""Warm start: explicit renames, and every leftover is listed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

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


def test_takes_over_all_parameters_and_keeps_the_sharding(workdir):
  mesh = jax.make_mesh((4,), ('d',), axis_types=(AxisType.Auto,),
                       devices=jax.devices()[:4])  # fmt: skip
  split = NamedSharding(mesh, PartitionSpec('d'))
  params = jax.device_put(fresh(), split)
  started = warm_start(params, workdir)
  assert_trees_equal(started, SAVED)
  assert all(leaf.sharding == split for leaf in jax.tree.leaves(started))
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
