"""Sizes of published models, their parameter counts and FLOPs."""

import jax
import jax.numpy as jnp
import pytest

from model_lib import bert, flops, sizes, vit
from tests.model_lib import plain


def bert_model(**fields):
  return bert.BertClassifier(num_classes=2, **fields)


def inputs_of(model, shape):
  is_text = isinstance(model, bert.BertClassifier)
  is_image = isinstance(model, vit.ViT)
  inputs = jnp.zeros((1, *shape), jnp.float32 if is_image else jnp.int32)
  return (inputs, inputs, jnp.full(1, shape[0])) if is_text else (inputs,)


def shapes(model, shape):
  return jax.eval_shape(model.init, jax.random.key(0), *inputs_of(model, shape))


@pytest.mark.parametrize(
  ('model', 'millions'),
  [
    # Devlin et al. 2019 (110 M, 340 M), Sanh et al. 2019 (66 M), Turc et al.
    # 2019 (4.4, 11.3, 29.1, 41.7 M), MiniLM (22.7 M), all without a head.
    ('base', 109.5), ('large', 335.1), ('distil', 66.4), ('tiny', 4.4),
    ('mini', 11.2), ('small', 28.8), ('medium', 41.4), ('minilm', 22.7),
    # Dosovitskiy et al. 2021, and DeiT's Ti, with 1,000 classes.
    ('Ti/16', 5.7), ('S/16', 22.0), ('B/16', 86.6), ('L/16', 304.3),
    # AdaTape, Table 7, with 18,291 classes.
    ('B/28', 100.98),
  ],
)  # fmt: skip
def test_parameter_counts_of_the_literature(model, millions):
  if '/' in model:
    classes = 18_291 if model == 'B/28' else 1000
    params = shapes(vit.ViT(classes, model), (224, 224, 3))['params']
  else:
    fields = sizes.BERT.defaults | sizes.BERT.fields(model)
    params = shapes(bert_model(**fields), (5,))['params']
    del params['head']
    if model == 'distil':
      del params['pooler']
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  assert count / 1e6 == pytest.approx(millions, abs=0.06)


def test_a_variant_may_name_its_patches():
  want = {'width': 768, 'depth': 12, 'mlp_dim': 3072, 'num_heads': 12}
  assert sizes.VIT.fields('B/14') == want | {'patch_size': 14}
  assert 'patch_size' not in sizes.VIT.fields('Ti')
  sizes.BERT.fields('base')['width'] = 0
  assert sizes.BERT.fields('base') == want
  assert want.items() <= sizes.BERT.defaults.items()


@pytest.mark.parametrize('variant', ['H/14', 'B/0', 'B/', 'B16', '', 'b/16'])
def test_unknown_variants_are_named(variant):
  for table in (sizes.VIT, sizes.BERT):
    with pytest.raises(ValueError, match='variant: expected one of'):
      table.fields(variant)


def test_explicit_sizes_override_the_variant():
  model = vit.ViT(10, 'Ti/16', depth=3, patch_size=8)
  got = (model.width, model.depth, model.mlp_dim, model.num_heads)
  assert (*got, model.patch_size) == (192, 3, 768, 3, 8)
  model = bert_model(variant='base', depth=6)
  assert (model.width, model.depth, model.num_heads) == (768, 6, 12)
  assert model.clone(depth=3).width == 768


@pytest.mark.parametrize(
  ('build', 'field'),
  [
    (lambda: vit.ViT(10, 'Ti'), 'patch_size'),
    (lambda: bert_model(width=8, depth=1, mlp_dim=8), 'num_heads'),
    (lambda: bert_model(variant='tiny', num_heads=-1), 'num_heads'),
  ],
)
def test_missing_sizes_are_named(build, field):
  with pytest.raises(ValueError, match=f'^{field}: expected a positive'):
    build()


SMALL = {'width': 256, 'mlp_dim': 1024, 'num_heads': 4}
BERT = SMALL | {'depth': 3, 'vocab_size': 11, 'max_positions': 32}


@pytest.mark.parametrize(
  ('model', 'shape'),
  [
    (vit.ViT(10, 'S/16', depth=2, pool='cls'), (64, 64, 3)),
    (vit.ViT(10, 'S/16', depth=2, pool='gap'), (64, 64, 3)),
    (vit.TokenTransformer(2, depth=3, **SMALL), (16,)),
    (bert_model(**BERT), (24,)),
  ],
)
def test_flops_agree_with_the_compiler(model, shape):
  got = plain.counted_flops(model, *inputs_of(model, shape))
  assert model.flops(shape) == pytest.approx(got, rel=0.03)


def test_flops_of_the_literature():
  # DeiT, Table 1 and its code: G multiply-adds at 224 pixels.
  for variant, multiply_adds in dict(Ti=1.26, S=4.6, B=17.6).items():
    got = vit.ViT(1000, f'{variant}/16').flops((224, 224, 3)) / 2e9
    assert got == pytest.approx(multiply_adds, rel=0.01)
  # [CLS] alone saves about five sixths of a block.
  share = flops.cls_block(128, 768, 3072) / flops.block(128, 768, 3072)
  assert share == pytest.approx(1 / 6, abs=0.01)
