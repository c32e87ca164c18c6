"""AdaTape-ViT: plain NumPy, invariants, sizes; settings of the reading."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit

from adatape.bank import SharedNorm
from adatape.model import AdaTapeViT
from adatape.parity import ParityModel
from adatape.reading import Reading, bank_drop, query_noise
from core.errors import ConfigError
from tests.adatape import plain_vit, tape_test
from tests.halting import loop_test
from tests.model_lib import plain

ROWS, C = 6, 24
TINY = dict(
  num_classes=3, width=16, depth=3, mlp_dim=24, num_heads=2, patch_size=8,
  bank_patch_size=4, bank_size=C, tokens_per_step=2, max_steps=5,
  threshold=1.7, query_dim=8,
)  # fmt: skip
CASES = {
  'learn cls': dict(bank='learnable', pool='cls', insert_after=2),
  'learn gap': dict(
    bank='learnable', pool='gap', insert_after=0, read_mlp='', tape_mlp='mlp'
  ),
  'input cls': dict(bank='input', pool='cls', insert_after=1, tape_mlp='glu'),
  'input gap': dict(bank='input', pool='gap', insert_after=2, read_mlp='mlp'),
}
IMAGES = plain.normal(ROWS, 16, 24, 3)


@functools.cache
def case(name):
  """(model, random parameters, its logits and tape, in NumPy)."""
  model = AdaTapeViT(**TINY, **CASES[name])
  params = plain.noise(model, IMAGES, scale=0.4)
  # Larger scores, so that the tapes of the rows differ in length.
  params['encoder']['tape_norm']['scale'] *= 5.0
  return model, params, *run(model, params)


def run(model, params):
  """(logits, tape) of the model."""
  apply = jax.jit(model.apply)
  logits, out = jax.device_get(apply({'params': params}, IMAGES))
  return logits, out['tape']


def image_bank(params, image, p):
  """Z = h2(h1(X_p) + E_pos), appendix A.2."""
  return plain.dense(params['projection'], plain_vit.tokens(params, image, p))


def forward(model, params, image):
  """One row in float64: (logits, picks, tape loss)."""
  params, image = plain.float64((params, image))
  encoder, tokens = params['encoder'], params['tokens']
  x = plain_vit.tokens(tokens, image, model.patch_size)
  assert ('cls' in tokens) == (model.pool == 'cls')
  bank = params['tape_bank']
  if model.bank == 'input':
    bank = image_bank(bank, image, model.bank_patch_size)
  else:
    bank = bank['tokens']
  networks = None
  if model.tape_mlp:
    networks = {'mlp': slice(len(x)), 'tape_mlp': slice(len(x), None)}
  for index in range(model.insert_after):
    x = plain_vit.block(encoder[f'block_{index}'], x, model.num_heads)
  norm, query = encoder['tape_norm'], x[0] if model.pool == 'cls' else x.mean(0)
  query = plain.layer_norm(norm, query)[: model.query_dim]
  tape, picks, _, loss = tape_test.loop(
    plain.layer_norm(norm, bank), query, model.reading(), np.zeros(C, bool)
  )
  if model.read_mlp:
    tape = plain.mlp(encoder['read_network'], tape)
  x = np.concatenate([x, tape])  # without the slots that the model masks
  for index in range(model.insert_after, model.depth):
    x = plain_vit.block(encoder[f'block_{index}'], x, model.num_heads, networks)
  x = plain.layer_norm(encoder['norm'], x)
  pooled = x[0] if model.pool == 'cls' else x.mean(0)
  return plain.dense(params['head'], pooled), picks, loss


@pytest.mark.parametrize('name', CASES)
def test_model_equals_plain_numpy(name):
  model, params, logits, tape = case(name)
  for row, image in enumerate(IMAGES):
    want, picks, loss = forward(model, params, image)
    assert tape['length'][row] == len(picks)
    np.testing.assert_array_equal(tape['indices'][row, : len(picks)], picks)
    np.testing.assert_allclose(tape['loss'][row], loss, atol=1e-5)
    np.testing.assert_allclose(logits[row], want, atol=1e-4)
  assert len(set(tape['length'])) > 1
  assert np.ptp(logits, axis=0).min() > 1e-2


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('tokens_per_step', 0), ('max_steps', 0), ('query_dim', -1),
    ('threshold', -1.0), ('threshold', float('nan')),
    ('query_update', 'mean'), ('loss', 'act'),
  ],
)  # fmt: skip
def test_illegal_settings_of_the_reading_are_named(field, value):
  legal = dict(tokens_per_step=2, max_steps=4, threshold=1.0, query_dim=8)
  with pytest.raises(ValueError, match=f'{field}: expected'):
    Reading(**(legal | {field: value}))


def test_fixed_length_needs_one_bank_token_per_step():
  assert Reading(5, 4, float('inf'), 8).min_bank_size == 4
  assert Reading(5, 4, 2.0, 8).min_bank_size == 20


def test_bank_drop_has_its_rate_and_leaves_enough():
  keys = jax.random.split(jax.random.key(0), 400)
  dropped = np.asarray(bank_drop(keys, 0.1, 500, keep=50))
  assert abs(dropped.mean() - 0.1) < 0.02
  dropped = np.asarray(bank_drop(keys, 0.9, 40, keep=30))
  assert (dropped.sum(1) == 10).all()
  # Early and late tokens are dropped alike: 1/4 each, 5 deviations at most.
  share = dropped.mean(0)
  assert np.abs(share - 0.25).max() < 5 * (0.25 * 0.75 / 400) ** 0.5
  assert not np.asarray(bank_drop(keys, 0.9, 30, keep=30)).any()


def test_noise_has_its_scale_and_differs_between_rows():
  keys = jax.random.split(jax.random.key(0), 64)
  noisy = query_noise(keys, jnp.ones((64, 128)), 0.01) - 1.0
  np.testing.assert_allclose(noisy.std(), 0.01, rtol=0.05)
  assert not np.array_equal(noisy[0], noisy[1])


@pytest.mark.nightly
def test_tape_loss_trains_what_comes_before_the_insertion():
  # Invariant 8.
  model, params, *_ = case('input cls')

  def loss(params):
    return model.apply({'params': params}, IMAGES)[1]['tape']['loss'].sum()

  gradient = jax.jit(jax.grad(loss))(params)
  inner = gradient.pop('encoder')
  largest = {
    name: max(float(jnp.abs(x).max()) for x in jax.tree.leaves(part))
    for name, part in {**gradient, **inner}.items()
  }
  untouched = {'block_1', 'block_2', 'norm', 'read_network', 'head'}
  assert {name for name in largest if largest[name] == 0} == untouched
  trained = {'tokens', 'tape_bank', 'tape_norm', 'block_0'}
  assert set(largest) - untouched == trained


def test_a_learnable_bank_is_trained_where_it_is_read():
  model, params, *_ = case('learn gap')

  def loss(params):
    logits, out = model.apply({'params': params}, IMAGES[:1])
    return (logits**2).sum(), out['tape']

  gradient, tape = jax.jit(jax.grad(loss, has_aux=True))(params)
  rows = np.abs(gradient['tape_bank']['tokens']).max(-1) > 0
  read = np.unique(np.asarray(tape['indices'])[np.asarray(tape['mask']) > 0])
  assert set(np.flatnonzero(rows)) == set(read)
  assert 0 < len(read) < C


def test_an_input_bank_too_small_for_the_reading_is_named():
  few = AdaTapeViT(**(TINY | dict(bank='input', bank_patch_size=8)))
  with pytest.raises(
    ConfigError, match=r'bank_size: expected at least .* = 10'
  ):
    few.init(jax.random.key(0), IMAGES)


FIXED = dict(CASES['input gap'], fixed_length=True, read_mlp='')


@pytest.mark.parametrize('bias', [-4.0, -0.5, 0.0, 6.0])
def test_tokens_have_the_weights_of_act(bias):
  model = AdaTapeViT(**TINY, **FIXED, act=True)
  params = plain.noise(model, IMAGES)
  halt = params['encoder']['halt']
  halt['bias'][:] = bias
  _, tape, _ = model.apply({'params': params}, IMAGES, method='read')
  fixed = model.clone(act=False)
  _, whole, _ = fixed.apply({'params': params}, IMAGES, method='read')
  for row in range(3):
    scores = expit((whole.tokens[row] @ halt['kernel'])[:, 0] + bias)
    steps, _, weights = loop_test.plain(scores, 0.01)
    assert tape.length[row] == steps == tape.mask[row].sum()
    expected = np.array(weights)[:, None] * whole.tokens[row]
    np.testing.assert_allclose(tape.tokens[row], expected, atol=1e-5)
  with pytest.raises(ConfigError, match='act: expected fixed_length=True'):
    AdaTapeViT(**TINY, act=True)


@pytest.mark.parametrize('tape_mlp', ['', 'mlp', 'glu'])
def test_flops_agree_with_the_compiler(tape_mlp):
  wide = dict(width=256, mlp_dim=1024, fixed_length=True, tape_mlp=tape_mlp)
  model = AdaTapeViT(**TINY | wide | dict(max_steps=8))
  got = plain.counted_flops(model, IMAGES[:1])
  assert model.flops(IMAGES.shape[1:]) == pytest.approx(got, rel=0.03)


@pytest.mark.parametrize('symbol', [None, 0, 2])
def test_parity_equals_plain_numpy(symbol):
  model = ParityModel(
    2, max_steps=4, threshold=1.4, depth=1, width=16, mlp_dim=24,
    num_heads=2, query_dim=8, query_symbol=symbol,
  )  # fmt: skip
  symbols = np.random.default_rng(0).integers(0, 3, (12, 9), np.int32)
  given = jnp.asarray(symbols)
  params = plain.noise(model, given, scale=0.4)
  params['encoder']['tape_norm']['scale'] *= 8.0
  logits, out = jax.jit(model.apply)({'params': params}, given)
  exact = plain.float64(params)
  encoder, rows = exact['encoder'], exact['tape_bank']['projection']
  table = rows['kernel'] + rows['bias']
  norm, lengths = encoder['tape_norm'], set()
  for row, text in enumerate(symbols):
    token = exact['token'][0] if 'token' in exact else exact['cls'][0]
    token = token if symbol is None else token + table[symbol]
    tape, picks, _, loss = tape_test.loop(
      plain.layer_norm(norm, table[text]),
      plain.layer_norm(norm, token)[0, : model.query_dim],
      model.reading(),
      np.zeros(len(text), bool),
    )
    lengths.add(len(picks))
    x = np.concatenate([token, tape])
    x = plain_vit.block(encoder['block_0'], x, model.num_heads)
    want = plain.dense(params['head'], plain.layer_norm(encoder['norm'], x)[0])
    np.testing.assert_allclose(logits[row], want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(out['tape']['loss'][row], loss, atol=1e-5)
    # Equal symbols are equal tokens, so only their names are compared.
    ours = out['tape']['indices'][row, : len(picks)]
    np.testing.assert_array_equal(text[ours], text[picks])
  assert len(lengths) > 1


@pytest.mark.parametrize('mean', [0.0, 1e3, -1e4])
def test_the_shared_norm_does_not_depend_on_the_mean(mean):
  tokens = np.float32(np.random.default_rng(0).normal(mean, 1.0, (64, 192)))
  params = {'scale': np.ones(192), 'bias': np.zeros(192)}
  want = plain.layer_norm(params, np.float64(tokens))[:, :8]
  params = jax.tree.map(jnp.float32, params)
  ours = SharedNorm().apply({'params': params}, jnp.asarray(tokens), 8)
  # Some units in the last place of the mean, as for `LayerNorm`.
  atol = 1e-5 + abs(mean) * 2.0**-22
  np.testing.assert_allclose(ours, want, rtol=0, atol=atol)


def test_parity_of_equal_symbols():
  model = ParityModel(2, max_steps=4, threshold=2.0)
  ones = jnp.ones((1, 8), jnp.int32)
  (_, out), _ = model.init_with_output(jax.random.key(1), ones)
  # Equal weights: a halting score of 1/2 per step, so that all steps run.
  assert out['tape']['length'] == 4
  np.testing.assert_allclose(out['tape']['loss'], 4 * 0.5, atol=1e-6)
  assert 0 < model.flops((8,), tape_length=2.5) < model.flops((8,))
  assert model.flops((8,)) == model.flops((8,), tape_length=4)
