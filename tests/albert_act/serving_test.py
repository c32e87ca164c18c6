"""Compacted = masked: the same logits and iterations for every row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from albert_act import compaction, packed_attention, transposed_kernels
from albert_act.serving import AlbertChain
from serve_lib.items import TextReader
from tests.albert_act import small
from tests.eat import small as small_eat


@pytest.fixture(scope='module', autouse=True)
def few_sizes():
  """Each size is compiled for every program: few show what all would."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(compaction, 'SHARES', (0.25, 0.5, 1.0))
    patch.setattr(compaction, 'FEW_TOKENS', (16,))
    patch.setattr(packed_attention, 'SHARES', (0.5, 1.0))
    yield


@functools.cache
def apply_of(model):
  return jax.jit(model.apply)


def check(chain, variables, count):
  """Runs all stages with a row of padding; compares with the masked form."""
  texts = small_eat.rows(count, low=1, high=24, vocab_size=40)
  batch = carry = chain.pad(list(map(small_eat.item, texts)), 24, 8)
  for index in range(chain.num_stages):
    stage = jax.jit(chain.stage(index, 'compacted', 24))
    carry, outputs = stage(chain.variables, carry)
  assert not outputs['running'].any()
  batch['tokens'] = np.minimum(batch['tokens'], chain.model.vocab_size - 1)
  logits, out = apply_of(chain.model)(
    variables, *map(jnp.asarray, batch.values())
  )
  steps = outputs['steps']
  np.testing.assert_allclose(
    outputs['logits'][:count], logits[:count], atol=1e-5
  )
  np.testing.assert_array_equal(steps[:count], out['ponder']['steps'][:count])
  assert not steps[count:].any()  # padding rows


@pytest.mark.parametrize(
  ('halting', 'iterations'),
  [
    ('act', 4),
    pytest.param('straight_through', 4, marks=pytest.mark.slow),
    pytest.param('act', 1, marks=pytest.mark.slow),
  ],
)
def test_compacted_form_equals_masked_form(halting, iterations):
  model, variables = small.build(halting=halting)
  chain = AlbertChain(model, variables, iterations=iterations)
  assert chain.num_stages == {1: 6, 4: 2}[iterations]
  check(chain, variables, 7)


def test_contents_of_padding_are_never_read():
  model, variables = small.build()
  # A token id that does not exist has an embedding of NaN.
  unknown = type('Unknown', (TextReader,), {'pad_id': model.vocab_size})
  chain = AlbertChain(model, variables, unknown(None, 512))
  check(chain, variables, 3)


def test_halted_tokens_are_not_computed():
  # Their states are poisoned; nothing reads them but as keys and values, which
  # were made before.
  model, variables = small.build()
  halted = jnp.arange(9)[None] >= jnp.array([3, 1, 1, 5])[:, None]

  def run(module, inputs):
    tokens = compaction.begin(module, *inputs)
    running = tokens.halting.running & ~halted
    tokens = dataclasses.replace(
      tokens,
      x=jnp.where(halted[:, :, None], jnp.nan, tokens.x),
      halting=tokens.halting.replace(running=running),
    )
    return compaction.iterate(module, tokens, 2, (10, 36))

  transposed = {'params': transposed_kernels.transpose(variables['params'])}
  tokens = model.apply(transposed, small.batch(), method=run)
  finite = np.isfinite(np.asarray(tokens.x)).all(2)
  np.testing.assert_array_equal(finite, ~np.asarray(halted))
