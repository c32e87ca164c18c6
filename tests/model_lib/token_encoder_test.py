"""A ViT that prunes and merges: two equal forms, plain loops, the engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adatape.avit import AViT
from adatape.deit import DeiT
from adatape.vit_3ffn import ViT3FFN
from core.errors import ConfigError
from model_lib import tokens
from model_lib.vit import ViT
from serve_lib.engine import Engine
from tests.adatape import plain_vit
from tests.adatape.plain_vit import BATCH, IMAGES, INFO, SIZES
from tests.model_lib import plain
from train_lib.classification import Classification

PRUNED = dict(prune_layers=(1, 3), prune_ratios=(0.3, 0.5))
MERGED = dict(merge_layers=(1, 2, 3), merge_count=5)
POOLS = ['cls', 'gap']


@functools.cache
def params(pool='cls'):
  return plain.noise(ViT(**SIZES, pool=pool), IMAGES)


def run(pool='cls', **fields):
  model = ViT(**SIZES, pool=pool, **fields)
  return jax.jit(model.apply)({'params': params(pool)}, IMAGES)


@pytest.mark.parametrize('scores', ['attention', 'cls', 'norm'])
@pytest.mark.parametrize('pool', POOLS)
def test_masked_and_gathered_form_have_equal_logits(pool, scores):
  given = PRUNED | dict(prune_scores=scores, pool=pool)
  if (pool, scores) == ('gap', 'cls'):
    with pytest.raises(ConfigError, match=r'prune_scores.*pool=gap'):
      run(**given)
    return
  logits, out = run(**given)
  masked, kept = run(prune_masked=True, **given)
  np.testing.assert_allclose(logits, masked, atol=1e-4)
  # 1 + ceil(.7 * 16) = 13, 1 + ceil(.5 * 12) = 7; 12 and 6 without [CLS]
  count = 7 if pool == 'cls' else 6
  assert out['positions'].shape == (4, count)
  assert kept['positions'].shape == (4, 16 + (pool == 'cls'))
  assert (out['length'] == count).all()
  np.testing.assert_array_equal(out['positions'], kept['positions'][:, :count])
  assert (out['positions'][:, 0] == 0).all() or pool == 'gap'
  assert np.abs(logits - run(pool)[0]).max() > 1e-3


def merged_by_loop(x, sizes, metric, count):
  """ToMe of one row with [CLS], pair by pair, in float64."""
  units = metric / np.linalg.norm(metric, axis=-1, keepdims=True)
  cosine = units[::2] @ units[1::2].T
  order = sorted(range(1, len(cosine)), key=lambda n: -cosine[n].max())
  total, weight = x * sizes[:, None], sizes.copy()
  for n in order[:count]:
    host = 2 * cosine[n].argmax() + 1
    total[host] += sizes[2 * n] * x[2 * n]
    weight[host] += sizes[2 * n]
  left = [0, *sorted(order[count:])]
  places = [2 * n for n in left] + [*range(1, len(x), 2)]
  return (total / weight[:, None])[places], weight[places]


def tome_by_loop(image, depth=4, heads=2):
  """Logits of one image; the attention is proportional to the sizes."""
  p = plain.float64(params())
  x = plain_vit.tokens(p['tokens'], image, 4)
  sizes = np.ones(len(x))
  for layer in range(1, depth + 1):
    of = p['encoder'][f'block_{layer - 1}']
    normed = plain.layer_norm(of['attention_norm'], x)
    attention = of['attention']
    x = x + plain.attention_by_loop(attention, normed, heads, sizes=sizes)[0]
    if layer in MERGED['merge_layers']:
      keys = plain.dense(attention['key'], normed).reshape(len(x), heads, -1)
      count = tokens.merged_count(len(x), MERGED['merge_count'])
      x, sizes = merged_by_loop(x, sizes, keys.mean(1), count)
    x = x + plain.mlp(of['mlp'], plain.layer_norm(of['mlp_norm'], x))
  cls = plain.layer_norm(p['encoder']['norm'], x)[0]
  return plain.dense(p['head'], cls), sizes


def test_merging_equals_a_plain_loop():
  logits, out = run(**MERGED)
  for row, image in enumerate(IMAGES):
    want, sizes = tome_by_loop(image)
    np.testing.assert_allclose(logits[row], want, atol=1e-4)
    assert sizes.sum() == 17
    assert len(sizes) == out['positions'].shape[1] == 17 - 5 - 5 - 3


def test_a_merged_mean_counts_every_patch():
  x = jax.random.normal(jax.random.key(0), (3, 9, 4))
  start = tokens.whole(x, jnp.full(3, 9))
  merge = jax.jit(tokens.merge_pairs, static_argnums=(2, 3))
  got = merge(merge(start, x, 3, 0), x[:, :6], 9, 0)
  assert got.x.shape == (3, 3, 4)
  assert (got.sizes.sum(1) == 9).all()
  total = (got.x * got.sizes[..., None]).sum(1)
  np.testing.assert_allclose(total, x.sum(1), atol=1e-5)


@pytest.mark.parametrize('pool', POOLS)
@pytest.mark.parametrize('fields', [PRUNED, MERGED], ids=['pruned', 'merged'])
def test_parameters_are_those_of_the_vit_and_flops_the_compilers(fields, pool):
  dense, model = (ViT(**SIZES, pool=pool, **f) for f in ({}, fields))
  shapes = [
    jax.eval_shape(one.init, jax.random.key(0), IMAGES)
    for one in (dense, model)
  ]
  assert jax.tree.structure(shapes[0]) == jax.tree.structure(shapes[1])
  large = dict(variant='Ti/16', num_classes=1000, pool=pool)
  if fields is PRUNED:
    fields = dict(prune_layers=(3, 6, 9), prune_ratios=(0.3, 0.3, 0.3))
  else:
    fields = dict(merge_layers=range(1, 13), merge_count=8)
  vit, model = ViT(**large), ViT(**large, **fields)
  shape = (224, 224, 3)
  assert 0.5 < model.flops(shape) / vit.flops(shape) < 0.8
  image = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
  counted = plain.counted_flops(model, image) - plain.counted_flops(vit, image)
  saved = model.flops(shape) - vit.flops(shape)
  assert counted == pytest.approx(saved, rel=0.1)


# ONNX Runtime has no translation of the gather that merges tokens.
@pytest.mark.parametrize(
  ('fields', 'backend'),
  [
    pytest.param(PRUNED, 'xla', marks=pytest.mark.nightly),
    (PRUNED, 'onnxruntime'),
    pytest.param(MERGED, 'xla', marks=pytest.mark.slow),
  ],
)
def test_the_engine_serves_it(fields, backend):
  if backend == 'onnxruntime':
    pytest.importorskip('onnxruntime')
  model = {'name': 'model_lib.vit:ViT', **SIZES, **fields}
  model.pop('num_classes')
  config = {'model': model, 'loss': {}, 'dtype': 'float32', 'dataset': {}}
  Classification.validate_config(config)
  task = Classification(config, INFO)
  want, _ = jax.jit(task.apply)(params(), {}, BATCH)
  chain, policy = task.serve({'params': params()}, {})
  with Engine(chain, policy, (1,), (1, 4), backend=backend) as engine:
    answers = engine.predict([*np.asarray(BATCH['image'])])
  got = [[*answer.probabilities.values()] for answer in answers]
  np.testing.assert_allclose(got, jax.nn.softmax(want), atol=1e-4)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (dict(prune_layers=(4,), prune_ratios=(0.3,)), r'prune_layers.*\[1, 3\]'),
    (dict(prune_layers=(1, 2), prune_ratios=(0.3,)), 'prune_ratios.*each'),
    (dict(merge_layers=(1,)), 'merge_count'),
    (PRUNED | dict(merge_layers=(1,), merge_count=2), 'merge_layers.*none of'),
    (MERGED | dict(prune_masked=True), 'prune_masked'),
  ],
)
def test_fields_that_do_not_fit_are_refused(fields, message):
  with pytest.raises(ConfigError, match=message):
    ViT(**SIZES, **fields)


@pytest.mark.parametrize('kind', [AViT, DeiT, ViT3FFN])
def test_models_with_an_encoder_of_their_own_refuse_them(kind):
  with pytest.raises(ConfigError, match=rf'expected \(\) in {kind.__name__}'):
    kind(**SIZES, **PRUNED)
