"""Stages in ONNX Runtime: equal answers, and a refusal of what is unknown."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from core.errors import ConfigError
from eat.window_attention import window_attend
from model_lib import layers
from model_lib.attention import attend, masked_scores
from model_lib.modern_bert import ModernBertBlock, rotate
from serve_lib.engine import Engine
from serve_lib.programs import Programs
from tests.serve_lib import families_test as families

pytest.importorskip('onnxruntime', reason='needs onnx and onnxruntime')

from serve_lib.onnx.graph import NotTranslatedError
from serve_lib.onnx.program import build, translate

X = np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)
PLACES = np.array([[3, 0], [1, 1], [2, 3]], np.int32)


def check(function, arguments, **counts):
  """The program gives the same; `counts` are operators of a kind."""
  model, _ = translate(function, arguments)
  kinds = [node.op_type for node in model.graph.node]
  assert {kind: kinds.count(kind) for kind in counts} == counts
  expected = jax.jit(function)(*arguments)
  found = build(function, arguments)(arguments)
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    assert one.dtype == other.dtype
    np.testing.assert_allclose(one, other, atol=1e-5)


def normalised(x):
  centred = x - x.mean(-1, keepdims=True)
  variance = jnp.square(centred).mean(-1, keepdims=True)
  return centred * jax.lax.rsqrt(variance + 1e-6) * W[:1, None] + W[1:2, None]


def attention(x):
  q, k, v = (x @ (W * scale) + W[:1, None] for scale in (1.0, 0.5, -1.0))
  scores = jnp.einsum('bqd,bkd->bqk', q, k)
  scores = jnp.where(jnp.arange(4)[None, None] < 3, scores, -1e30)
  return jnp.einsum('bqk,bkd->bqd', jax.nn.softmax(scores), v)


@jax.vmap
def written(row, places):
  return row.at[places].set(-1.0, mode='promise_in_bounds')


@pytest.mark.parametrize('function', [
    normalised, attention,
    lambda x: jax.nn.gelu(x @ W, approximate=False),
    lambda x: jax.nn.gelu(x @ W),
    # Forms that are nearly those that are fused.
    lambda x: jnp.exp(x) / jnp.exp(x).sum(1, keepdims=True),
    lambda x: x.sum(-1, keepdims=True) / 3.0,
    lambda x: x.sum(1, keepdims=True) / 8.0,
    lambda x: x[..., :4].sum(1)[..., None] / 4.0,
    lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True),
    lambda x: jnp.sort(jnp.round(x[..., 0] * 10) % 4, axis=-1),
    lambda x: jnp.take_along_axis(x, PLACES[..., None], axis=1),
    lambda x: (x[:, ::2, 1:5].max(-1), x[0, 0, 0], (x > 0.5) & (x < 1.0)),
    lambda x: jnp.concatenate([x, jnp.broadcast_to(x[:1], x.shape)], 1).T,
    lambda x: jnp.where(x > 0, x.astype(jnp.int32) // 2, jnp.int32(-1)),
    lambda x: jax.lax.scan(lambda y, z: (y + z, (y, y.sum())), x[0], x[1:]),
    lambda x: written(x[..., 0], PLACES),
])  # fmt: skip
def test_a_function_gives_the_same(function):
  check(function, [X])


def _pruned(x, length, like):
  place = jnp.arange(x.shape[1])[None]
  scores = jnp.where(place < length[:, None], jnp.abs(x[..., 0]), -1.0)
  order = jnp.sort(scores, axis=1)[:, : like.shape[0]]
  flat = (x.reshape(-1, 8) @ W).reshape(x.shape)
  wide = jnp.broadcast_to(flat[:, :1], flat.shape)
  return order, flat[:, 0], wide[:, : like.shape[0]], x.shape[1] - length


def test_sizes_may_be_known_at_run_time_only():
  rows, tokens, kept = export.symbolic_shape('b, l, k', constraints=['k <= l'])
  shapes = (rows, tokens, 8), (rows,), (kept,)
  dtypes = jnp.float32, jnp.int32, jnp.int8
  given = [*map(jax.ShapeDtypeStruct, shapes, dtypes)]
  program = build(_pruned, given)
  rng = np.random.default_rng(4)
  for rows, tokens, kept in ((1, 3, 3), (4, 7, 2), (2, 12, 5)):
    x = rng.normal(size=(rows, tokens, 8)).astype(np.float32)
    length = rng.integers(1, tokens + 1, rows).astype(np.int32)
    values = x, length, np.zeros(kept, np.int8)
    for one, other in zip(program(values), _pruned(*values), strict=True):
      assert one.shape == other.shape
      np.testing.assert_allclose(one, other, atol=1e-5)


def test_blocks_of_local_attention_have_sizes_known_at_run_time():
  block = ModernBertBlock(num_heads=2, mlp_dim=8, base=9.0, reach=3)
  rng = np.random.default_rng(0)

  def run(x, valid, positions):
    return block.apply(variables, x, valid, positions=positions).x

  def given(rows, tokens):
    x = rng.normal(size=(rows, tokens, 8)).astype(np.float32)
    places = rng.integers(1, 3, (rows, tokens), np.int32).cumsum(1)
    count = rng.integers(1, tokens + 1, (rows, 1))
    return x, np.arange(tokens) < count, places.astype(np.int32)

  x, _, positions = map(jnp.asarray, given(1, 4))
  variables = block.init(jax.random.key(0), x, positions=positions)
  rows, tokens = export.symbolic_shape('b, l', constraints=['l >= 2'])
  shapes = (rows, tokens, 8), (rows, tokens), (rows, tokens)
  kinds = jnp.float32, jnp.bool_, jnp.int32
  program = build(run, [*map(jax.ShapeDtypeStruct, shapes, kinds)])
  for size in ((1, 2), (2, 3), (3, 4), (2, 9), (1, 23)):
    values = given(*size)
    want, valid = jax.jit(run)(*values), values[1][..., None]
    np.testing.assert_allclose(program(values) * valid, want * valid, atol=1e-5)


TOKENS = np.random.default_rng(2).normal(size=(2, 6, 8)).astype(np.float32)
LENGTH = np.array([4, 6], np.int32)


def heads_of(x, kernel):
  flat = (x.reshape(-1, 8) @ kernel).reshape(x.shape) + W[None, :1]
  return flat.reshape(*x.shape[:2], 2, 4).transpose(0, 2, 1, 3)


def attended(x, length, *, near=0, queries=6, mask=True, hidden=False):
  q = heads_of(x[:, :queries], W)
  k, v = heads_of(x, W * 0.5), heads_of(x, -W)
  valid = jnp.arange(6)[None] < length[:, None]
  if near:  # two masks of scores, instead of one
    is_near = jnp.abs(jnp.arange(6)[:, None] - jnp.arange(6)[None]) <= near
    scores = masked_scores(q, k, valid)
    weights = jax.nn.softmax(
      jnp.where(is_near[None, None], scores, -1e30), axis=-1
    )
    return jnp.einsum('bnls,bnsh->bnlh', weights, v)
  if hidden:  # values are masked otherwise than scores
    fewer = jnp.arange(6)[None] < length[:, None] - 2
    v = jnp.where(fewer[:, None, :, None], v, 0.0)
  result, _ = attend(q, k, v, valid if mask else None)
  return result.transpose(0, 2, 1, 3).reshape(x.shape[0], queries, 8)


@pytest.mark.parametrize(('changes', 'kind'), [
    ({}, 'Attention'), (dict(mask=False), 'Attention'),
    (dict(queries=1), 'MultiHeadAttention'), (dict(near=2), ''),
    (dict(mask=False, hidden=True), ''),
])  # fmt: skip
def test_attention_is_one_operator_with_the_same_result(changes, kind):
  kinds = 'Attention', 'MultiHeadAttention'
  counts = {name: int(name == kind) for name in kinds}
  check(functools.partial(attended, **changes), [TOKENS, LENGTH], **counts)


@pytest.mark.parametrize('other', [
    None, lambda x: x * 0.7, lambda x: x * x, lambda x: (x + 1) * 0.5**0.5,
])  # fmt: skip
def test_gelu_is_one_operator(other):
  def nearly(x):
    return 0.5 * x * (1.0 + jax.lax.erf(other(x)))

  x = np.linspace(-9.0, 9.0, 1001, dtype=np.float32)
  check(nearly if other else layers.gelu, [x], Gelu=int(not other))


PLACES_IN_TEXT = np.array([[0, 2, 3, 7, 8, 11], [0, 1, 4, 5, 6, 9]], np.int32)


def turned(x, positions, other=0):
  """Nearly a rotation, in one of several ways, if `other`."""
  a, b = jnp.split(x.reshape(2, 6, 2, 4), 2, axis=-1)
  if other == 1:
    a, b = b, a
  angles = positions[:, :, None, None] * jnp.array([[[[1.0, 0.1]]]])
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  first = b * sin - a * cos if other == 2 else a * cos - b * sin
  second = b * sin + a * sin if other == 3 else b * cos + a * sin
  return jnp.concatenate([first, second], -1).reshape(x.shape)


@pytest.mark.parametrize(('function', 'count'), [
    (lambda x, n: rotate(x, n, 2, 9.0), 1),
    (lambda x, n: rotate(x[:, :2], n, 4, 9.0), 1),
    (lambda x, n: rotate(x, jnp.broadcast_to(n[:1], n.shape), 1, 9.0), 1),
    (turned, 1), *((functools.partial(turned, other=n), 0) for n in (1, 2, 3)),
])  # fmt: skip
def test_a_rotation_is_one_operator(function, count):
  check(function, [TOKENS, PLACES_IN_TEXT], RotaryEmbedding=count)


def windowed(x, length, received=False):
  heads = (heads_of(x, kernel) for kernel in (W, W * 0.5, -W))
  valid = jnp.arange(6)[None] < length[:, None]
  return window_attend(*heads, valid, window=2, received=received)


@pytest.mark.parametrize('received', [False, True])
def test_attention_in_a_window_is_one_operator_too(received):
  function = functools.partial(windowed, received=received)
  # With a softmax for the scores of the tokens.
  check(function, [TOKENS, LENGTH], Attention=1, Softmax=int(received))


HEADS = np.random.default_rng(3).normal(size=(3, 1, 2, 4, 4)).astype(np.float32)


def mixed(q, k, v, valid=None):
  scores = jnp.einsum('bnlh,bnsh->bnls', q, k)
  if valid is not None:
    scores = jnp.where(valid[:, None, None], scores, -1e30)
  return jnp.einsum('bnls,bnsh->bnlh', jax.nn.softmax(scores, axis=-1), v)


@pytest.mark.parametrize(('is_fused', 'function'), [
    (True, lambda q, k, v, valid: mixed(0.5 * q, k, v)),
    (True, lambda q, k, v, valid: mixed(q * v, k, v, valid)),
    # Features are masked, as many as there are keys.
    (False, lambda q, k, v, valid: mixed(
      q, k, jnp.where(valid[:, None, None], v, 0.0), valid)),
    # Fewer features of values than of keys; the same keys for all heads.
    (False, lambda q, k, v, valid: mixed(q, k, v[..., :2])),
    (False, lambda q, k, v, valid: mixed(
      q, jnp.broadcast_to(k[:, :1], k.shape), v)),
])  # fmt: skip
def test_what_is_nearly_attention_has_the_same_result(function, is_fused):
  given = [*HEADS, np.arange(4)[None] < 3]
  check(function, given, MultiHeadAttention=int(is_fused))


@pytest.mark.parametrize(('function', 'words'), [
    (lambda x: jax.lax.while_loop(lambda y: y.sum() < 9, jnp.exp, x), 'while'),
    (lambda x: x.astype(jnp.int32) & 3, 'and'),
    (lambda x: jnp.sort(x, axis=1), 'another axis'),
    (lambda x: jnp.einsum('abc,dbc->ad', x, x), 'several axes'),
    (lambda x: x[PLACES[:, 0], PLACES[:, 1]], 'gather'),
    (lambda x: x.at[0].set(1.0), 'scatter'),
])  # fmt: skip
def test_what_has_no_translation_is_refused(function, words):
  with pytest.raises(NotTranslatedError, match=words):
    translate(function, [X])


@pytest.mark.parametrize('name', families.FAMILIES)
def test_alone_and_in_batches_of_any_size_the_answers_are_the_same(name):
  family = families.FAMILIES[name]()
  chain, policy = family.serve()
  options = dict(backend='onnxruntime')
  with Engine(chain, policy, policy.lengths, (5,), **options) as engine:
    assert engine.warm_up().backend == 'onnxruntime'
    for index, item in enumerate(family.items):
      families.check(family, index, engine.submit(item).result(60))
    for items in (range(families.COUNT), range(families.COUNT)[::-1]):
      families.check_all(family, engine, items)
    if chain.num_stages > 1:
      assert engine.status()['peak_pool_bytes']
    # Rows leave, or have tapes of other lengths.
    if name in ('eat', 'adatape', 'eat modernbert'):
      assert engine.status()['copies']


def test_a_batch_mixes_lengths_and_has_no_unused_rows(monkeypatch):
  family, padded = families.eat(), []
  chain, policy = family.serve()
  pad = chain.pad

  def spy(rows, length, size):
    padded.append(([len(row['tokens']) for row in rows], length, size))
    return pad(rows, length, size)

  def compare(answers):
    for one, other in zip(answers, alone[1:], strict=True):
      assert one.fields == other.fields
      shares = (list(x.probabilities.values()) for x in (one, other))
      np.testing.assert_allclose(*shares, atol=1e-5)

  chain.pad = spy
  items = [{'tokens': [*range(5, 5 + length)]} for length in (1, 3, 16)]
  with Engine(chain, policy, (4, 16), (4,), backend='onnxruntime') as engine:
    alone = [engine.submit(item).result(60) for item in items]
    padded.clear()
    compare(engine.predict(items[1:]))
    assert padded == [([3, 16], 16, 2)]
    monkeypatch.setattr(engine._programs, 'padding', 12)  # it takes 13
    padded.clear()
    compare(engine.predict(items[1:]))
    assert padded == [([3], 3, 1), ([16], 16, 1)]


def test_what_cannot_be_translated_runs_in_xla():
  bank = dict(bank='learnable', bank_size=600, max_steps=300)
  family = families.adatape(families.tapes.IMAGE | bank, 'image')
  chain, policy = family.serve()
  given = chain, policy, policy.lengths, (1,)
  with pytest.raises(ConfigError, match=r"engine.backend: .*'xla'"):
    Engine(*given, backend='onnxruntime')
  assert isinstance(Engine(*given)._programs, Programs)
