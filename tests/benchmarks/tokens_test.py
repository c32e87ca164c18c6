"""Pruned and merged ViTs beside ToMe in PyTorch."""

import functools

import numpy as np
import pytest

from benchmarks import tokens
from eval_lib.report import Estimate
from model_lib.vit import ViT

SIDE = 224


@functools.cache
def candidates():
  flags = tokens.main.parse(
    ['--variants=Ti/16', f'--image_size={SIDE}', '--batch=2', '--keep=0.7,0.5']
  )
  [(case, found)] = tokens.cases(flags)
  assert case == {'variant': 'Ti/16'}
  return {one.name: one for one in found}


def test_merging_takes_the_flops_of_pruning():
  found = candidates()
  kinds = [one.columns['kind'] for one in found.values()]
  assert kinds == [
    'ours', 'pruned', 'pruned', 'merged', 'merged', 'torch', 'torch merged',
    'torch merged',
  ]  # fmt: skip
  for keep in (0.7, 0.5):
    pruned, merged = (found[f'{k} {keep}'] for k in ('pruned', 'merged'))
    assert merged.flops == pytest.approx(pruned.flops, rel=0.05)
    assert merged.flops == found[f'torch merged {keep}'].flops
    assert found[f'torch merged {keep}'].group == merged.group
  assert found['ours'].flops == ViT(1000, 'Ti/16').flops((SIDE, SIDE, 3))


def test_a_row_of_the_table_of_the_docs():
  row = dict(
    variant='Ti/16', keep=0.7, kind='merged', flops=1.3e9, limit=1.9,
    images_per_second=Estimate(90.0, 80.0, 100.0),
    speedup=Estimate(1.5, 1.4, 1.6),
  )  # fmt: skip
  line = ['Ti/16', 0.7, 'merged (ToMe)', '1.30', '90.0', '1.50 [1.40, 1.60]',
          '1.90']  # fmt: skip
  assert [*tokens.documented(row).values()] == line


@pytest.mark.peers
@pytest.mark.parametrize('count', [0, 3])
def test_pytorch_computes_the_same_logits(count):
  pytest.importorskip('torch')
  sizes = dict(width=32, mlp_dim=64, num_heads=4, patch_size=8, depth=3)
  merging = dict(merge_layers=(1, 2, 3), merge_count=count) if count else {}
  model, shape = ViT(10, **sizes, **merging), (2, 64, 64, 3)
  ours, theirs = (tokens._prepare(k, model, shape) for k in ('ours', 'torch'))
  np.testing.assert_allclose(ours.output, theirs.output, atol=1e-4)
