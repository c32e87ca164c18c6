"""Schedules and optimizers against values computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adatape.model import AdaTapeViT
from model_lib.bert import BertClassifier
from model_lib.vit import ViT
from train_lib import optimizers


def config(**fields):
  return (
    dict(
      name='adamw',
      lr=1.0,
      schedule='cosine',
      warmup_steps=10.0,
      end_lr=0.0,
      weight_decay=0.0,
      clip_norm=0.0,
      b1=0.9,
      b2=0.999,
      eps=1e-8,
    )
    | fields
  )


def rates(steps, **fields):
  schedule = optimizers.build_schedule(config(**fields), total_steps=110)
  return [float(schedule(step)) for step in steps]


def test_warm_up_is_linear_and_its_first_step_moves():
  assert rates([0, 5, 10]) == pytest.approx([0.1, 0.55, 1.0])


@pytest.mark.parametrize(
  ('schedule', 'halfway', 'end'),
  [('cosine', 0.5, 0.0), ('linear', 0.5, 0.0), ('constant', 1.0, 1.0)],
)
def test_decay_after_warm_up(schedule, halfway, end):
  values = rates([60, 110], schedule=schedule)
  assert values == pytest.approx([halfway, end], abs=1e-6)


def test_rsqrt_falls_with_the_square_root_of_the_step():
  assert rates([10, 40], schedule='rsqrt') == pytest.approx([1.0, 0.5])


def test_warm_up_as_a_share_of_all_steps():
  assert rates([11], warmup_steps=0.1) == pytest.approx([1.0])


def params():
  return {
    'block': {'mlp': {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)}},
    'norm': {'scale': jnp.ones(2)},
    'cls': jnp.ones(2),
    'positions': {'embedding': jnp.ones((3, 2))},
  }


def test_only_matrices_are_decayed():
  assert optimizers.decay_mask(params()) == {
    'block': {'mlp': {'kernel': True, 'bias': False}},
    'norm': {'scale': False},
    'cls': False,
    'positions': {'embedding': False},
  }


SIZE = dict(
  num_classes=3, width=8, depth=2, mlp_dim=8, num_heads=2, patch_size=8
)
MODELS = {
  'vit': lambda: ViT(**SIZE),
  'learnable': lambda: AdaTapeViT(
    bank='learnable', bank_size=60, query_dim=4, **SIZE
  ),
  'input': lambda: AdaTapeViT(
    bank='input', bank_patch_size=2, query_dim=4, **SIZE
  ),
}
BLOCK = (
  'attention/query', 'attention/key', 'attention/value', 'attention/out',
  'mlp/hidden', 'mlp/out',
)  # fmt: skip
DENSE = {f'encoder/block_{i}/{name}' for i in (0, 1) for name in BLOCK} | {
  'head',
  'tokens/patch_embed/projection',
}
READ = {f'encoder/read_network/{name}' for name in ('hidden', 'gated', 'out')}
# What is decayed is the kernel of each of these, and nothing else is.
DECAYED = {
  'vit': DENSE,
  'learnable': DENSE | READ,
  'input': DENSE
  | READ
  | {'tape_bank/patch_embed/projection', 'tape_bank/projection'},
}
KEPT = {
  'vit': {'tokens/positions/embedding', 'tokens/cls'},
  'learnable': {'tokens/positions/embedding', 'tape_bank/tokens'},
  'input': {'tokens/positions/embedding', 'tape_bank/positions/embedding'},
}


@pytest.mark.parametrize('name', MODELS)
def test_decay_on_the_real_models(name):
  image = jnp.zeros((1, 16, 16, 3))
  init = MODELS[name]().init
  shapes = jax.eval_shape(init, jax.random.key(0), image)['params']
  mask = {
    optimizers.path_name(path): decayed
    for path, decayed in jax.tree_util.tree_leaves_with_path(
      optimizers.decay_mask(shapes)
    )
  }
  decayed = {path for path, on in mask.items() if on}
  assert decayed == {f'{dense}/kernel' for dense in DECAYED[name]}
  assert KEPT[name] <= mask.keys() - decayed


def test_trainable_matches_paths():
  mask = optimizers.trainable_mask(params(), '^block/mlp/bias|cls')
  assert mask['block']['mlp'] == {'kernel': False, 'bias': True}
  assert mask['cls']
  assert not mask['norm']['scale']


def one_update(gradient, **fields):
  fields = config(schedule='constant', warmup_steps=0.0, **fields)
  schedule = optimizers.build_schedule(fields, 10)
  optimizer = optimizers.build_optimizer(fields, schedule)
  weights = {'kernel': jnp.asarray([[3.0, 4.0]])}
  updates, _ = optimizer.update(
    {'kernel': jnp.asarray([gradient])}, optimizer.init(weights), weights
  )
  return np.asarray(updates['kernel'][0])


def test_sgd_with_clipping_and_decay_by_hand():
  update = one_update(
    [6.0, 8.0], name='sgd', b1=0.0, lr=0.5, clip_norm=1.0, weight_decay=0.1
  )
  # Clipped to norm 1: (.6, .8); decay adds .1 * (3, 4); times -.5.
  np.testing.assert_allclose(update, [-0.45, -0.6], rtol=1e-6)


def test_first_adam_step_has_the_size_of_the_learning_rate():
  update = one_update([6.0, -8.0], name='adam', lr=0.1)
  np.testing.assert_allclose(update, [-0.1, 0.1], rtol=1e-4)


def test_lamb_scales_the_step_to_the_norm_of_the_weights():
  update = one_update([1.0, 1.0], name='lamb', lr=0.1)
  # The direction is (1, 1), its norm sqrt(2); weights have norm 5.
  np.testing.assert_allclose(update, [-0.5 / 2**0.5] * 2, rtol=1e-4)


@pytest.mark.parametrize('name', optimizers.OPTIMIZERS)
def test_every_optimizer_goes_downhill(name):
  fields = config(name=name, lr=0.05, schedule='constant', warmup_steps=0.0)
  optimizer = optimizers.build_optimizer(
    fields, optimizers.build_schedule(fields, 100)
  )
  weights = {'kernel': jnp.full((4, 4), 2.0)}
  state = optimizer.init(weights)
  loss = lambda w: jnp.square(w['kernel'] - 1.0).mean()  # noqa: E731
  start = loss(weights)

  @jax.jit
  def step(weights, state):
    updates, state = optimizer.update(jax.grad(loss)(weights), state, weights)
    return jax.tree.map(jnp.add, weights, updates), state

  for _ in range(20):
    weights, state = step(weights, state)
  assert float(loss(weights)) < float(start)


def test_decay_on_bert_spares_only_biases_and_norms():
  model = BertClassifier(
    num_classes=2, width=8, depth=1, mlp_dim=8, num_heads=2, vocab_size=9
  )
  row, length = jnp.zeros((1, 4), jnp.int32), jnp.full(1, 4)
  shapes = jax.eval_shape(model.init, jax.random.key(0), row, row, length)
  mask = {
    optimizers.path_name(path): decayed
    for path, decayed in jax.tree_util.tree_leaves_with_path(
      optimizers.decay_mask(shapes['params'])
    )
  }
  kept = {name for name in mask if name.endswith(('/bias', '/scale'))}
  assert {name for name, decayed in mask.items() if not decayed} == kept
  assert mask['embeddings/token_type/embedding']
