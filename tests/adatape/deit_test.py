"""DeiT: both heads in NumPy; its loss by hand."""

import types

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

from adatape.deit import DeiT, Distillation
from model_lib.vit import ViT
from tests import losses
from tests.adatape import plain_vit
from tests.adatape.plain_vit import BATCH, IMAGES, INFO, MASK, SIZES
from tests.model_lib import plain
from tests.train_lib import mixup_test
from train_lib.classification import Classification

MODEL = DeiT(**SIZES)
PARAMS = plain.noise(MODEL, IMAGES)
TEACHERS = plain.noise(ViT(**SIZES), IMAGES, seed=8)
HEADS = ('head', 'distillation_head')


def test_equals_a_loop_over_images():
  logits, out = jax.jit(MODEL.apply)({'params': PARAMS}, IMAGES)
  params = plain.float64(PARAMS)
  encoder = params['encoder']
  for row, image in enumerate(IMAGES):
    second = params['distillation'][0]
    x = plain_vit.tokens(params['tokens'], image, 4, second)
    for index in range(SIZES['depth']):
      x = plain_vit.block(encoder[f'block_{index}'], x, SIZES['num_heads'])
    x = plain.layer_norm(encoder['norm'], x)[:2]
    both = [plain.dense(params[h], x[i]) for i, h in enumerate(HEADS)]
    np.testing.assert_allclose(out['heads'][:, row], both, atol=1e-4)
    np.testing.assert_allclose(logits[row], np.mean(both, 0), atol=1e-4)
    np.testing.assert_allclose(out['features'][row], x.mean(0), atol=1e-4)


def test_flops_are_those_of_the_paper():
  got = DeiT(1000, 'S/16').flops((224, 224, 3)) / 2e9
  assert 4.6 < got < 4.7  # 4.6 for DeiT-S (Table 5)


def task_of(kind=Distillation, model='adatape.deit:DeiT', **loss):
  fields = {k: v for k, v in SIZES.items() if k != 'num_classes'}
  config = {
    'model': {'name': model, **fields}, 'loss': loss, 'dtype': 'float32',
  }  # fmt: skip
  kind.validate_config(config)
  return kind(config, INFO)


KINDS = [
  'hard',
  *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ('soft', 'none')),
]


@pytest.mark.parametrize('kind', KINDS)
def test_loss_by_hand(kind):
  task = task_of(
    label_smoothing=0.1, distillation='hard' if kind == 'none' else kind
  )
  teacher = task_of(Classification, 'model_lib.vit:ViT')
  target, _ = jax.jit(lambda p: teacher.apply(p, {}, BATCH))(TEACHERS)
  target = np.asarray(target, np.float64)
  task.teacher = types.SimpleNamespace(task=teacher)
  frozen = {'params': TEACHERS, 'model_state': {}} if kind != 'none' else {}
  weight = 0.5 if kind == 'hard' else 0.2
  knobs = {} if kind == 'hard' else {'distill_weight': weight}

  given = PARAMS, BATCH, knobs, frozen, jax.random.split(jax.random.key(0), 4)
  both = jax.value_and_grad(losses.of(task), (0, 3), has_aux=True)
  (loss, metrics), (gradient, theirs) = both(*given)
  out = jax.jit(lambda p: task.apply(p, {}, BATCH)[1])(PARAMS)
  first, second = (log_softmax(np.float64(head), -1) for head in out['heads'])
  label = np.eye(3)[np.asarray(BATCH['label'])] * 0.9 + 0.1 / 3
  if kind == 'hard':
    distance = -second[np.arange(4), target.argmax(-1)]
  elif kind == 'soft':
    own = np.float64(out['heads'][1])
    p, q = (log_softmax(logits / 3, -1) for logits in (target, own))
    distance = 9 * (np.exp(p) * (p - q)).sum(-1)
  else:
    distance = -(label * second).sum(-1)
  rows = (1 - weight) * -(label * first).sum(-1) + weight * distance
  np.testing.assert_allclose(loss, rows[MASK > 0].mean(), atol=1e-5)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
  assert all(np.abs(gradient[head]['kernel']).max() > 0 for head in HEADS)
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(theirs))
  assert ('teacher_agreement' in metrics) == (kind != 'none')


@pytest.mark.nightly
def test_mixup_reaches_both_heads():
  mixup_test.assert_mixes(task_of(label_smoothing=0.1), PARAMS, BATCH)
