"""Properties of every model: rows, noise, dtypes, gradients.

A new model is a row of `MODELS`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adatape.avit import AViT
from adatape.deit import DeiT
from adatape.model import AdaTapeViT
from adatape.parity import ParityModel
from adatape.ponder_vit import PonderViT
from adatape.universal import (
  UniversalTransformer,
  UniversalViT,
  UnsharedViT,
  UViT,
)
from adatape.vit_3ffn import ViT3FFN
from albert_act.model import AlbertClassifier, AlbertPretraining
from core import fields
from core.errors import ConfigError
from eat.model import EatClassifier, EatModernBert
from halting.token_rules import ACT, PonderNet, SkipACT, Threshold
from model_lib.bert import BertClassifier
from model_lib.modern_bert import ModernBertClassifier
from model_lib.vit import TokenTransformer, ViT
from recurrent_act.model import RecurrentModel
from tests import wrong_values
from tests.albert_act import small as small_albert
from tests.eat import small as small_eat
from tests.model_lib import plain

SIZES = dict(num_classes=3, width=16, mlp_dim=32, num_heads=4, dropout=0.2)
TEXTS = dict(num_classes=3, dropout=0.2, attention_dropout=0.2)
IMAGES = jax.random.normal(jax.random.key(0), (4, 8, 8, 3))
SYMBOLS = jnp.asarray(np.random.default_rng(0).integers(0, 3, (4, 6)))
WORDS = small_eat.batch(small_eat.rows(4, vocab_size=11), 20)
SEQUENCES = (IMAGES[:, :6, 0], jnp.arange(6)[None] < jnp.array([[6], [2]] * 2))
VIT = SIZES | dict(depth=2, patch_size=4)
TAPE = dict(
  bank_size=24, tokens_per_step=2, max_steps=5, threshold=1.7, query_dim=8,
  bank_drop=0.3, query_noise=0.5,
)  # fmt: skip
BERT = TEXTS | plain.TINY | dict(vocab_size=11, max_positions=20)
# (model, inputs of four rows)
MODELS = {
  'vit': (ViT(**VIT), [IMAGES]),
  'vit gap': (ViT(**VIT, pool='gap', positions='sincos2d'), [IMAGES]),
  'vit pruned': (
    ViT(**VIT, pool='gap', prune_layers=(1,), prune_ratios=(0.5,)), [IMAGES]
  ),
  'vit merged': (ViT(**VIT, merge_layers=(1, 2), merge_count=1), [IMAGES]),
  'avit': (AViT(**VIT, gamma=1.0, beta=-0.5), [IMAGES]),
  'avit dynamic': (AViT(**VIT, beta=0.5, gamma=1.0, dynamic=True), [IMAGES]),
  'deit': (DeiT(**VIT), [IMAGES]),
  'vit 3ffn': (ViT3FFN(**VIT), [IMAGES]),
  'transformer': (TokenTransformer(**SIZES, depth=2), [SYMBOLS]),
  'adatape': (
    AdaTapeViT(**VIT, **TAPE, tape_mlp='mlp', pool='gap'), [IMAGES]
  ),
  'adatape input': (
    AdaTapeViT(**VIT, **TAPE, bank='input', bank_patch_size=1), [IMAGES]
  ),
  'parity': (
    ParityModel(**SIZES, max_steps=3, threshold=1.5, query_dim=8), [SYMBOLS]
  ),
  'universal': (UniversalTransformer(**SIZES, max_steps=5), [SYMBOLS]),
  'universal dynamic': (
    UniversalTransformer(**SIZES, max_steps=5, dynamic=True), [SYMBOLS]
  ),
  'universal vit': (UniversalViT(**SIZES, max_steps=3, patch_size=4), [IMAGES]),
  'unshared': (UnsharedViT(**SIZES, max_steps=3, patch_size=4), [IMAGES]),
  'uvit': (UViT(**VIT, ut_steps=2), [IMAGES]),
  'ponder': (PonderViT(**SIZES, max_steps=3, patch_size=4), [IMAGES]),
  'bert': (BertClassifier(**BERT), WORDS),
  'modernbert': (ModernBertClassifier(**BERT, pooling='mean'), WORDS),
  'eat': (EatClassifier(**(small_eat.FIELDS | TEXTS)), WORDS),
  'eat modernbert': (EatModernBert(**(small_eat.MODERN | TEXTS)), WORDS),
  'albert': (AlbertClassifier(**(small_albert.FIELDS | TEXTS)), WORDS),
  'recurrent': (RecurrentModel(num_classes=3, width=8, max_steps=3), SEQUENCES),
  'recurrent skip': (
    RecurrentModel(
      num_classes=3, width=8, max_steps=3, cell='gru', rule=SkipACT(mu=3)
    ),
    SEQUENCES,
  ),
}  # fmt: skip
KEYS = jax.random.split(jax.random.key(2), 4)
# Largest distance of bfloat16 logits from float32 ones.
BFLOAT16 = dict.fromkeys(MODELS, 0.04) | {
  'universal': 0.02, 'universal dynamic': 0.02, 'universal vit': 0.02,
  'eat': 0.06, 'albert': 0.01, 'recurrent': 0.004, 'recurrent skip': 0.004,
}  # fmt: skip


def models(*default, without=()):
  """All models, of which those that are not `default` run at night."""
  return pytest.mark.parametrize(
    'name',
    [
      pytest.param(name, marks=() if name in default else pytest.mark.nightly)
      for name in MODELS
      if name not in without
    ],
  )


@functools.cache
def variables_of(name):
  """Random parameters, norms and biases too."""
  model, inputs = MODELS[name]
  shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)
  return small_eat.randomised(shapes)


@functools.cache
def compiled(name):
  return jax.jit(
    lambda variables, inputs, keys: MODELS[name][0].apply(
      variables, *inputs, row_keys=keys
    )
  )


def logits_of(name, keys=None, rows=slice(None)):
  inputs = [array[rows] for array in MODELS[name][1]]
  keys = None if keys is None else keys[rows]
  return compiled(name)(variables_of(name), inputs, keys)[0]


@models(
  'vit', 'avit dynamic', 'bert', 'adatape', 'universal dynamic', 'recurrent'
)
@pytest.mark.parametrize(
  'noise', [True, pytest.param(False, marks=pytest.mark.nightly)]
)
def test_a_row_and_its_noise_do_not_depend_on_the_batch(name, noise):
  keys = KEYS if noise else None
  whole = logits_of(name, keys)
  for rows in (jnp.array([3, 1, 0, 2]), jnp.array([1] * 4)):
    some = logits_of(name, keys, rows)
    np.testing.assert_allclose(some, whole[rows], atol=1e-6)
  if noise and hasattr(MODELS[name][0], 'dropout'):
    other = jax.random.split(jax.random.key(9), 4)
    for others in (None, other):
      assert np.abs(logits_of(name, others) - whole).max() > 1e-3


@models('vit', 'bert', 'adatape', 'universal', 'recurrent')
def test_parameters_logits_and_features_are_float32(name):
  model, inputs = MODELS[name]
  model = dataclasses.replace(model, dtype=jnp.bfloat16)
  shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)
  assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {
    jnp.dtype('float32')
  }
  logits, out = jax.jit(model.apply)(variables_of(name), *inputs)
  assert logits.dtype == out['features'].dtype == jnp.float32
  assert 0 < np.abs(logits - logits_of(name)).max() < BFLOAT16[name]
  if 'ponder' in out:
    assert out['ponder']['cost'].dtype == jnp.float32


# PonderNet's loss, and not its logits, trains the halting probability; only
# [CLS] of the last block of 'vit 3ffn' reaches the logits.
@models('bert', 'eat', without=['universal dynamic', 'ponder', 'vit 3ffn'])
def test_logits_train_every_parameter(name):
  model, inputs = MODELS[name]

  def loss(variables):
    logits, out = model.apply(variables, *inputs)
    return jnp.square(out.get('exits', logits)).sum()

  gradient = jax.jit(jax.grad(loss))(variables_of(name))
  for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
    assert np.isfinite(leaf).all(), path
    # A softmax does not change with the bias of its keys.
    if [key.key for key in path[-2:]] != ['key', 'bias']:
      assert np.abs(leaf).max() > 1e-7, jax.tree_util.keystr(path)


EAT = (EatClassifier, small_eat.FIELDS)
ALBERT = (AlbertClassifier, small_albert.FIELDS)
TAPED = (AdaTapeViT, VIT | TAPE)
UNIVERSAL = (UniversalTransformer, SIZES | dict(max_steps=5))
UNSHARED = (UnsharedViT, SIZES | dict(max_steps=5, patch_size=4))
UNNAMED = 'dtype', 'parent', 'name'  # a configuration does not set them
# A legal instance of every class of models and rules.
LEGAL = {type(model): model for model, _ in MODELS.values()} | {
  kind: kind() for kind in (ACT, PonderNet, SkipACT, Threshold)
}
# Values outside of a predicate.
ILLEGAL = {
  AViT: dict(rule='act'),
  EatClassifier: dict(window=7, pooler_activation='foo'),
  AlbertClassifier: dict(
    activation='foo', rule='always', halting_bias=float('nan')
  ),
  RecurrentModel: dict(rule='ponder'),
}
# (model and its fields, values that contradict another field)
CONTRADICTING = [
  (TAPED, dict(insert_after=3, bank_size=9, query_dim=17)),
  (EAT, dict(
    prune_layers=(4, 2), prune_ratios=(0.3,), exit_layers=(0,), num_heads=3,
  )),
  (EAT, dict(prune_layers=(2, 4), exit_layers=(5,))),
  (ALBERT, dict(
    num_groups=7, remat_chunk=5, variant='huge', width=-1, num_heads=3,
  )),
  ((PonderViT, SIZES | dict(max_steps=2, patch_size=4)), dict(rule=ACT())),
  ((AlbertPretraining, small_albert.FIELDS), dict(rule=PonderNet())),
  ((ACT, {}), dict(epsilon=1.5)),
  ((ViT, VIT), dict(num_heads=3)),
  ((ParityModel, dict(num_classes=2, max_steps=3, threshold=1.5)),
   dict(query_symbol=3, query_dim=33)),
  ((TokenTransformer, SIZES | dict(depth=2)), dict(num_heads=3)),
  (UNIVERSAL, dict(num_heads=3)),
  (UNSHARED, dict(num_heads=3, variant='Huge/16')),
]  # fmt: skip


@pytest.mark.parametrize('kind', LEGAL)
def test_annotations_declare_the_legal_values(kind):
  names = {field.name for field in dataclasses.fields(kind)} - {*UNNAMED}
  legal = {name: getattr(LEGAL[kind], name) for name in names}
  wrong = wrong_values.wrong_fields(kind, UNNAMED)
  for field, value in (*wrong, *ILLEGAL.get(kind, {}).items()):
    with pytest.raises(ConfigError) as caught:
      fields.check(kind, legal | {field: value}, 'model', without=('dtype',))
    assert caught.value.field == f'model.{field}', value


@pytest.mark.parametrize(
  ('kind', 'given', 'field'),
  [
    (kind, given | {field: value}, field)
    for (kind, given), values in CONTRADICTING
    for field, value in values.items()
  ],
)
def test_contradicting_fields_are_named_at_construction(kind, given, field):
  with pytest.raises(ValueError, match=f'^{field}: expected'):
    kind(**given)
