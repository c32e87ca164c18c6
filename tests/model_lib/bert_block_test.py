"""A block of BERT against a plain loop; [CLS] alone; masked tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from model_lib import bert_layers
from tests.model_lib.plain_bert import block_by_loop, noise


@pytest.fixture(scope='module')
def block_case():
  """A block, random parameters and tokens; a mask that is no prefix."""
  block = bert_layers.BertBlock(num_heads=4, mlp_dim=24)
  generator = np.random.default_rng(0)
  x = jnp.asarray(generator.normal(size=(3, 5, 16)), jnp.float32)
  mask = jnp.array([[1, 1, 1, 1, 1], [1, 0, 1, 0, 1], [1, 0, 0, 0, 0]])
  return block, noise(block, x), x, mask


def test_block_and_what_it_received_equal_a_plain_loop(block_case):
  block, params, x, mask = block_case
  out, received, _ = block.apply({'params': params}, x, mask, received=True)
  plain = block.apply({'params': params}, x, mask)
  np.testing.assert_array_equal(out, plain.x)
  assert plain.received is None
  for row in range(3):
    valid = np.flatnonzero(mask[row])
    rows = np.asarray(x[row], np.float64)[valid]
    want, shares = block_by_loop(params, rows, 4, 1e-12)
    np.testing.assert_allclose(out[row, valid], want, atol=1e-5)
    np.testing.assert_allclose(received[row, valid], shares, atol=1e-6)
    others = np.flatnonzero(mask[row] == 0)
    np.testing.assert_array_equal(received[row, others], 0.0)


@pytest.mark.parametrize('masked', [True, False])
def test_cls_alone_is_the_first_token_of_all(block_case, masked):
  block, params, x, mask = block_case
  mask = mask if masked else None
  got = block.apply({'params': params}, x, mask, num_queries=1).x
  assert got.shape == (3, 1, 16)
  want = block.apply({'params': params}, x, mask).x[:, :1]
  np.testing.assert_allclose(got, want, atol=1e-6)


def test_cls_alone_attends_to_all_whatever_the_window(block_case):
  _, params, x, mask = block_case

  def nothing(query, key, value, valid=None, *, drop=None, received=False):
    return jnp.zeros_like(query), None

  blind = bert_layers.BertBlock(num_heads=4, mlp_dim=24, attend=nothing)
  got = blind.apply({'params': params}, x, mask, num_queries=1).x
  want = block_case[0].apply({'params': params}, x, mask).x[:, :1]
  np.testing.assert_allclose(got, want, atol=1e-6)
  other = blind.apply({'params': params}, x, mask).x[:, :1]
  assert float(jnp.abs(other - want).max()) > 0.1


def test_cls_alone_receives_nothing(block_case):
  block, params, x, mask = block_case
  with pytest.raises(ValueError, match='received: expected as many queries'):
    block.apply({'params': params}, x, mask, received=True, num_queries=1)


@pytest.mark.parametrize('contents', [1e4, np.inf, np.nan])
@pytest.mark.parametrize('num_queries', [None, 1])
def test_masked_tokens_are_never_read(block_case, contents, num_queries):
  block, params, x, mask = block_case
  changed = jnp.where(mask[:, :, None] == 0, contents, x)
  got, want = (
    np.asarray(
      block.apply({'params': params}, t, mask, num_queries=num_queries).x
    )
    for t in (changed, x)
  )
  valid = np.asarray(mask)[:, : got.shape[1]] == 1
  np.testing.assert_array_equal(got[valid], want[valid])


def test_some_tokens_attend_to_keys_and_values_of_all(block_case):
  block, params, x, mask = block_case
  params = {'params': params}
  out = block.apply(params, x, num_queries=0)
  assert out.x.shape == (3, 0, 16)
  got = block.apply(params, x[:, 1:3], mask, keys_values=out.keys_values).x
  want = block.apply(params, x, mask).x[:, 1:3]
  np.testing.assert_allclose(got, want, atol=1e-6)
