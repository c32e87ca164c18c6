"""The dynamic form against the masked one."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from adatape.model import AdaTapeViT
from adatape.serving import DynamicClassifier

B = 6


@pytest.fixture(scope='module')
def trained():
  model = AdaTapeViT(
    num_classes=3,
    width=16,
    depth=2,
    mlp_dim=16,
    num_heads=2,
    patch_size=8,
    pool='gap',
    bank='input',
    bank_patch_size=4,
    tokens_per_step=2,
    max_steps=6,
    threshold=1.7,
    query_dim=8,
  )
  images = jax.random.normal(jax.random.key(0), (B, 16, 16, 3))
  variables = nn.unbox(jax.jit(model.init)(jax.random.key(1), images))
  return model, variables, images, jax.jit(model.apply)(variables, images)


@pytest.mark.parametrize('group_rows', [False, True])
def test_logits_are_those_of_the_masked_form(trained, group_rows):
  # Invariant 4, second half: static and cropped encoders agree.
  model, variables, images, (logits, out) = trained
  dynamic = DynamicClassifier(
    model, buckets=(1, 2, 3, 4), group_rows=group_rows
  )
  assert dynamic.buckets == (1, 2, 3, 4, 6)
  got, got_out = dynamic(variables, images)
  np.testing.assert_allclose(got, logits, atol=1e-5)
  np.testing.assert_allclose(got_out['features'], out['features'], atol=1e-5)
  assert got_out['tape'].pop('bank_size') == 16
  for name, value in got_out['tape'].items():
    np.testing.assert_array_equal(value, out['tape'][name])


def test_encoder_runs_on_the_shortest_bucket(trained, monkeypatch):
  model, variables, images, (_, out) = trained
  length = np.asarray(out['tape']['length'])
  assert length.min() < length.max() < model.max_steps
  dynamic = DynamicClassifier(model, buckets=range(1, 7))
  used = []
  original = dynamic._classify

  def spy(variables, x, tokens, mask, bucket):
    used.append((len(x), bucket))
    return original(variables, x, tokens, mask, bucket)

  monkeypatch.setattr(dynamic, '_classify', spy)
  dynamic(variables, images)
  assert used == [(B, length.max())]
  used.clear()
  dynamic.group_rows = True
  dynamic(variables, images)
  assert [bucket for _, bucket in used] == sorted(set(length))
  assert sum(rows for rows, _ in used) < 2 * B


def test_default_buckets_end_with_the_longest_tape(trained):
  assert DynamicClassifier(trained[0]).buckets == (2, 4, 6)


@pytest.mark.parametrize('bucket', [-1, 7])
def test_illegal_buckets_are_refused(trained, bucket):
  with pytest.raises(ValueError, match='buckets: expected'):
    DynamicClassifier(trained[0], buckets=(2, bucket))
