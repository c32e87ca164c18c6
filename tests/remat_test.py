"""Every family trains alike with its blocks scanned or computed again."""

import jax
import numpy as np
import pytest

from model_lib import blocks
from tests.golden import adapter
from tests.marks import first_is_slow

SUBJECTS = (
  'eat sst2', 'eat sst2 dense', 'albert pretrain act', 'recurrent parity',
  'parity adatape', 'parity ut', 'image_folder u2t', 'photographs avit',
  'photographs uvit', 'image_folder ponder', 'table6 deit', 'table7 3ffn',
)  # fmt: skip
FULL = blocks.Options(scan=True, remat='full')


def prepared(subject, folders):
  """(task, batch on the device)."""
  config = adapter.load(*adapter.configs()[subject], folders)
  task, batch = adapter.first_batch(config)
  return task, jax.device_put(batch)


@pytest.mark.parametrize('subject', first_is_slow(*zip(SUBJECTS)))
def test_the_step_of_each_family(subject, folders):
  task, batch = prepared(subject, folders)
  state = adapter.initial_parameters(task)
  plain = adapter.loss_and_gradient(task, *state, batch)
  with blocks.options(FULL):
    again = adapter.loss_and_gradient(task, *state, batch)
  np.testing.assert_allclose(again, plain, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('subject', SUBJECTS)
def test_the_forward_pass_is_computed_twice(subject, folders):
  task, batch = prepared(subject, folders)
  params, state = jax.eval_shape(lambda: adapter.initial_parameters(task))
  keys = jax.random.split(jax.random.key(0), len(batch['mask']))

  def count(chosen):
    def loss(params):
      norm = task.normalizers(batch)
      return task.loss(params, state_zeros, {}, batch, norm, keys, {})[0]

    state_zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)
    with blocks.options(chosen):
      lowered = jax.jit(jax.grad(loss)).lower(params)
    return lowered.cost_analysis()['flops']

  plain, again = (
    count(blocks.Options(remat=remat)) for remat in ('none', 'full')
  )
  assert 1.1 * plain < again < 1.5 * plain
