"""Collectives of the compiled train step: those of a ViT, no others."""

import contextlib
import math
import re

import jax
import pytest

from tests.golden import adapter
from train_lib.build import Setup

# An operation of the compiled program, with the shapes of its results.
COLLECTIVE = re.compile(
  r'= (.*?) ((?:ragged-)?all-[a-z-]+|reduce-scatter|collective-[a-z-]+)\('
)


def collectives(model):
  """{kind: sizes of its results}, and the sizes of the gradients."""
  flag = f'configs/adatape/digits.py:model={model}'
  config = adapter.load(flag, ['mesh.data=8', 'model.depth=2'], {})
  setup = Setup(config)
  with (
    jax.numpy_dtype_promotion('standard'),  # of optax
    jax.set_mesh(setup.mesh),
    contextlib.closing(setup.dataset.batches()) as batches,
  ):
    batch = setup.put(next(batches))
    text = setup.steps.get(setup.stages[0], batch)[0].as_text()
  found = {}
  for results, kind in COLLECTIVE.findall(text):
    for shape in re.findall(r'[a-z]\w*\[([\d,]*)\]', results):
      numbers = [int(number) for number in shape.split(',') if number]
      found.setdefault(kind, []).append(math.prod(numbers))
  gradients = [leaf.size for leaf in jax.tree.leaves(setup.abstract.params)]
  if model != 'vit':
    # Scale and bias of the shared norm: the query's leading features apart.
    gradients += 2 * [config.model.query_dim]
  return found, gradients


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ('vit', 'input')]


@pytest.mark.parametrize('model', ['learn', *SLOW])
def test_a_step_reduces_gradients_and_scalars_only(model):
  found, gradients = collectives(model)
  assert list(found) == ['all-reduce']
  large = sorted(size for size in found['all-reduce'] if size > 1)
  assert large == sorted(gradients)
