"""FLOPs of models without a formula, counted by the compiler."""

import jax
import numpy as np

from dataset_lib.source import DatasetInfo
from tests.golden import adapter
from train_lib.classification import Classification
from train_lib.text_classification import TextClassification

LENGTH = 64
SIZES = dict(width=32, depth=2, num_heads=2, mlp_dim=64, vocab_size=11)


def test_the_count_is_near_the_formula_and_of_the_longest_row():
  """A text task initializes its model with 8 tokens."""
  name = 'model_lib.bert:BertClassifier'
  config = dict(
    dtype='float32', loss={}, dataset={},
    model=dict(name=name, max_positions=LENGTH, **SIZES),
  )  # fmt: skip
  info = DatasetInfo('tokens', (LENGTH,), 'int32', 3, (), 1)
  task = TextClassification(config, info)
  assert task.example()['tokens'].shape == (1, 8)
  assert task.has_formula
  formula = task.model.flops((LENGTH,))
  assert task.flops() == formula
  assert 1.0 <= task.counted_flops() / formula <= 1.3


def test_outputs_have_the_count():
  """Pictures of cost read it, within a compiled function."""
  model = dict(name='tests.launch.wrong_models:Model')
  config = dict(dtype='float32', model=model, loss={}, dataset={})
  info = DatasetInfo('tokens', (8,), 'int32', 2, (), 1)
  task = Classification(config, info)
  assert not task.has_formula
  given = *adapter.initial_parameters(task), {'tokens': np.ones((3, 8), int)}
  flops = jax.jit(task.outputs)(*given)['flops']
  # 2 for each multiply-add of both layers, and others.
  np.testing.assert_array_equal(flops, np.full(3, task.flops(), np.float32))
  assert 2 * (24 * 8 + 8 * 2) <= task.flops() <= 500
