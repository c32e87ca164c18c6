"""AdaTape-ViT: plain NumPy, invariants, sizes; settings of the reading."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adatape.bank import ImageBank, SharedNorm
from adatape.model import AdaTapeViT
from adatape.parity import ParityModel
from adatape.reading import Reading, bank_drop, query_noise
from tests.adatape import plain_vit, tape_test
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


def forward(model, params, image, pool=None, query_norm=None):
  """One row in float64: (logits, picks, tape loss).

  `pool` and `query_norm` are of the query, if other than the model's.
  """
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
  query = x[0] if (pool or model.pool) == 'cls' else x.mean(0)
  norm = encoder['tape_norm']
  query = plain.layer_norm(query_norm or norm, query)[: model.query_dim]
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


@pytest.mark.parametrize('name', CASES)
def test_query_comes_from_the_pooled_tokens(name):
  # Shows that the test above sees which tokens the query is made of.
  model, params, _, tape = case(name)
  other = {'cls': 'gap', 'gap': 'cls'}[model.pool]
  losses = [forward(model, params, x, pool=other)[2] for x in IMAGES]
  assert np.abs(losses - tape['loss']).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize('name', ['learn cls', 'input gap'])
def test_bank_and_query_share_one_norm(name):
  model, params, _, before = case(name)
  encoder = params['encoder']
  norm = dict(encoder['tape_norm'], scale=1.5 * encoder['tape_norm']['scale'])
  changed = params | {'encoder': encoder | {'tape_norm': norm}}
  _, tape = run(model, changed)
  shared = [forward(model, changed, x)[2] for x in IMAGES]
  np.testing.assert_allclose(tape['loss'], shared, atol=1e-5)
  # Of the bank alone: the query keeps the old scale.
  apart = [
    forward(model, changed, x, query_norm=encoder['tape_norm'])[2]
    for x in IMAGES
  ]
  for other in (apart, before['loss']):
    assert np.abs(other - tape['loss']).max() > 1e-2


def test_image_bank_has_its_equation_and_order():
  bank = ImageBank(width=10, patch_size=4)
  params = plain.noise(bank, IMAGES)
  got = jax.jit(bank.apply)({'params': params}, IMAGES)
  assert got.shape == (ROWS, C, 10)
  for row, image in zip(got, IMAGES, strict=True):
    want = image_bank(*plain.float64((params, image)), 4)
    np.testing.assert_allclose(row, want, atol=1e-5)
  # Token 1 is the patch to the right, token 6 the one below.
  for token, (y, x) in ((1, (0, 4)), (6, (4, 0))):
    changed = np.array(IMAGES)
    changed[:, y : y + 4, x : x + 4] += 1.0
    other = bank.apply({'params': params}, jnp.asarray(changed))
    differs = np.abs(np.asarray(other - got)).max((0, 2)) > 1e-3
    assert np.flatnonzero(differs).tolist() == [token]


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('tokens_per_step', 0), ('max_steps', 0), ('query_dim', 0),
    ('max_steps', True), ('threshold', 0.0), ('threshold', float('nan')),
    ('query_update', 'mean'), ('loss', 'act'),
  ],
)  # fmt: skip
def test_errors_name_the_field(field, value):
  legal = dict(tokens_per_step=2, max_steps=4, threshold=2.0, query_dim=8)
  with pytest.raises(ValueError, match=f'{field}: expected'):
    Reading(**(legal | {field: value}))


def test_fixed_length_needs_one_bank_token_per_step():
  assert Reading(5, 4, float('inf'), 8).min_bank_size == 4
  assert Reading(5, 4, 2.0, 8).min_bank_size == 20


def test_bank_drop_has_its_rate_and_leaves_enough():
  keys = jax.random.split(jax.random.key(0), 16)
  dropped = np.asarray(bank_drop(keys, 0.1, 500, keep=50))
  assert abs(dropped.mean() - 0.1) < 0.02
  for rate in (0.5, 0.99):
    dropped = np.asarray(bank_drop(keys, rate, 40, keep=30))
    assert (~dropped).sum(1).min() >= 30
    assert dropped.any(1).all()
  assert not np.asarray(bank_drop(keys, 0.9, 30, keep=30)).any()


def test_bank_drop_draws_the_kept_tokens_near_the_limit():
  keys = jax.random.split(jax.random.key(0), 400)
  dropped = np.asarray(bank_drop(keys, 0.9, 40, keep=30))
  assert (dropped.sum(1) == 10).all()
  # Early and late tokens are dropped alike: 1/4 each, 5 deviations at most.
  share = dropped.mean(0)
  assert np.abs(share - 0.25).max() < 5 * (0.25 * 0.75 / 400) ** 0.5


def test_noise_has_its_scale_and_differs_between_rows():
  keys = jax.random.split(jax.random.key(0), 64)
  noisy = query_noise(keys, jnp.ones((64, 128)), 0.01) - 1.0
  np.testing.assert_allclose(noisy.std(), 0.01, rtol=0.05)
  assert not np.array_equal(noisy[0], noisy[1])


B = 6
GAP = dict(
  num_classes=3, width=16, depth=3, mlp_dim=16, num_heads=2, patch_size=8,
  bank='input', bank_patch_size=4, tokens_per_step=2, max_steps=5,
  threshold=1.7, query_dim=8, pool='gap',
)  # fmt: skip


def images(seed=0, rows=B):
  return jax.random.normal(jax.random.key(seed), (rows, 16, 16, 3))


@functools.cache
def initialised(**fields):
  model = AdaTapeViT(**(GAP | fields))
  init = jax.jit(model.init)
  return model, nn.unbox(init(jax.random.key(1), images(rows=1)))


def applied(model, variables):
  return jax.jit(model.apply)(variables, images())


@pytest.mark.nightly
def test_tape_loss_trains_what_comes_before_the_insertion():
  # Invariant 8.
  model, variables = initialised(tape_mlp='glu')

  def loss(variables):
    return model.apply(variables, images())[1]['tape']['loss'].sum()

  gradient = jax.jit(jax.grad(loss))(variables)['params']
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
  model, variables = initialised(bank='learnable', bank_size=24)

  def loss(variables):
    logits, out = model.apply(variables, images())
    return (logits**2).sum(), out['tape']

  gradient, tape = jax.jit(jax.grad(loss, has_aux=True))(variables)
  rows = np.abs(gradient['params']['tape_bank']['tokens']).max(-1) > 0
  read = np.unique(np.asarray(tape['indices'])[np.asarray(tape['mask']) > 0])
  assert set(np.flatnonzero(rows)) == set(read)
  assert 0 < len(read) < 24


@pytest.mark.nightly
def test_ablations_without_adaptive_length_and_without_bank():
  model, variables = initialised(fixed_length=True)
  _, out = applied(model, variables)
  assert (out['tape']['length'] == 5).all()
  assert out['tape']['indices'].shape == (B, 5, 1)
  model, variables = initialised(bank='none')
  logits, out = applied(model, variables)
  assert out['tape']['indices'] is None
  assert (out['tape']['length'] == 5).all()
  assert logits.shape == (B, 3)
  assert 'tape_norm' not in variables['params']['encoder']


def test_an_input_bank_too_small_for_the_reading_is_named():
  few = AdaTapeViT(**(GAP | {'bank_patch_size': 8}))
  with pytest.raises(ValueError, match=r'bank_size: expected at least .* = 10'):
    few.init(jax.random.key(0), images())


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


def test_parity_of_equal_and_shuffled_symbols():
  model = ParityModel(2, max_steps=4, threshold=2.0)
  symbols = jax.random.randint(jax.random.key(0), (32, 8), 0, 3)
  variables = nn.unbox(jax.jit(model.init)(jax.random.key(1), symbols))
  apply = jax.jit(model.apply)
  logits, out = apply(variables, symbols)
  shuffled, _ = apply(variables, symbols[:, ::-1])
  np.testing.assert_allclose(logits, shuffled, atol=1e-5)
  assert out['tape']['indices'].shape == (32, 4, 2)
  assert out['tape']['length'].min() >= 2
  # Equal weights: a halting score of 1/2 per step, so that all steps run.
  _, out = apply(variables, jnp.ones((1, 8), jnp.int32))
  assert out['tape']['length'] == 4
  np.testing.assert_allclose(out['tape']['loss'], 4 * 0.5, atol=1e-6)
  assert 0 < model.flops((8,), tape_length=2.5) < model.flops((8,))
  assert model.flops((8,)) == model.flops((8,), tape_length=4)
