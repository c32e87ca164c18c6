"""Compacted = masked = engine: the same logits and iterations for every row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_act import compaction, packed_attention, transposed_kernels
from albert_act.serving import AlbertChain
from serve_lib.chain import Encoded
from serve_lib.engine import Engine
from tests.albert_act import small

LENGTHS = (8, 24)


class Halted:
  """The policy of the tests: rows of token ids in, outputs out."""

  def encode(self, item):
    types = np.arange(len(item)) >= len(item) // 2
    inputs = {'tokens': item, 'token_types': types.astype(np.int32)}
    return Encoded(inputs, len(item), 'compacted')

  def decide(self, stage, rows, outputs):
    return ~np.asarray(outputs['running'])

  def answer(self, row):
    outputs = row.outputs[-1]
    length = len(row.encoded.inputs['tokens'])
    return outputs['logits'], outputs['steps'][:length], len(row.outputs)


@pytest.fixture(scope='module', autouse=True)
def few_sizes():
  """Each size is compiled for every program: few show what all would."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(compaction, 'SHARES', (0.25, 0.5, 1.0))
    patch.setattr(compaction, 'FEW_TOKENS', (16,))
    patch.setattr(packed_attention, 'SHARES', (0.5, 1.0))
    yield


def rows(count, seed=0, low=1, high=24):
  rng = np.random.default_rng(seed)
  lengths = rng.integers(low, high + 1, count)
  return [rng.integers(1, 40, length).astype(np.int32) for length in lengths]


def masked(model, variables, texts):
  """(logits, iterations of each token) of some rows, by the masked form."""
  chain = AlbertChain(model, variables)
  encoded = [Halted().encode(row).inputs for row in texts]
  batch = chain.pad(encoded, 24, 8)
  logits, out = apply_of(model)(variables, *map(jnp.asarray, batch.values()))
  return np.asarray(logits), np.asarray(out['ponder']['steps'])


@functools.cache
def apply_of(model):
  return jax.jit(model.apply)


def run_stages(chain, texts, length):
  """(logits, iterations) when no row leaves before the last stage."""
  encoded = [Halted().encode(row).inputs for row in texts]
  carry = chain.pad(encoded, length, len(texts) + 1)
  for index in range(chain.num_stages):
    stage = jax.jit(chain.stage(index, 'compacted', length))
    carry, outputs = stage(chain.variables, carry)
  assert not outputs['running'].any()
  return np.asarray(outputs['logits']), np.asarray(outputs['steps'])


@pytest.mark.parametrize(
  ('halting', 'iterations'),
  [
    ('act', 4),
    ('straight_through', 4),
    pytest.param('act', 1, marks=pytest.mark.slow),
  ],
)
def test_compacted_form_equals_masked_form(halting, iterations):
  model, variables = small.build(halting=halting)
  chain = AlbertChain(model, variables, iterations=iterations)
  assert chain.num_stages == {1: 6, 4: 2}[iterations]
  texts = rows(7)
  logits, steps = run_stages(chain, texts, 24)
  want, spent = masked(model, variables, texts)
  np.testing.assert_allclose(logits[:7], want[:7], atol=1e-5)
  np.testing.assert_array_equal(steps[:7], spent[:7])
  assert not steps[7:].any()  # the padding row


def test_contents_of_padding_are_never_read():
  model, variables = small.build()
  texts = rows(3)
  # A token id that does not exist has an embedding of NaN.
  chain = AlbertChain(model, variables, pad_id=model.vocab_size)
  logits, steps = run_stages(chain, texts, 24)
  want, spent = masked(model, variables, texts)
  np.testing.assert_allclose(logits[:3], want[:3], atol=1e-5)
  np.testing.assert_array_equal(steps[:3], spent[:3])


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


@pytest.fixture(scope='module')
def served():
  model, variables = small.build()
  params = dict(variables['params'])
  # The last token of a row halts after three to six iterations then.
  score = params['score']
  params['score'] = score | {'bias': score['bias'] + 1.5}
  variables = {'params': params}
  chain = AlbertChain(model, variables, iterations=3)
  with Engine(chain, Halted(), LENGTHS, (1, 4)) as engine:
    yield model, variables, engine


@pytest.mark.nightly
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 8))
def test_engine_gives_what_the_masked_form_gives(served, seed, count):
  model, variables, engine = served
  texts = rows(count, seed)
  answers = engine.predict(texts)
  want, spent = masked(model, variables, texts)
  for row, (logits, steps, stages) in enumerate(answers):
    np.testing.assert_allclose(logits, want[row], atol=1e-5)
    np.testing.assert_array_equal(steps, spent[row, : len(steps)])
    # It left with the stage in which its last token halted.
    assert stages == -(-int(steps.max()) // 3)
