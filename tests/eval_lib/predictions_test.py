"""Recorded outputs of a split: order, padding, lengths that differ, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import InvalidDataError
from core.fields import accepts
from eval_lib import heads, predictions
from halting.row_rules import Confidence

HEADS, CLASSES = 2, 3


class Buckets:
  """Batches of rows in the order of their length, each padded to its own."""

  def __init__(self, rows, batch_size=4):
    rng = np.random.default_rng(0)
    self.length = rng.integers(1, 9, rows)
    self.tokens = [rng.integers(1, 50, n) for n in self.length]
    self.label = rng.integers(0, CLASSES, rows)
    self.batch_size = batch_size

  def batches(self):
    order, size = np.argsort(self.length, kind='stable'), self.batch_size
    for index in np.split(order, range(size, len(order), size)):
      padding = (0, size - len(index))
      tokens = np.zeros((size, max(self.length[index], default=0)), np.int32)
      for row, place in zip(tokens, index, strict=False):
        row[: self.length[place]] = self.tokens[place]
      if len(index):
        yield {
          'tokens': tokens,
          'length': np.pad(self.length[index], padding),
          'label': np.pad(self.label[index], padding),
          'mask': np.pad(np.ones(len(index), np.float32), padding),
          'index': np.pad(index, padding, constant_values=-1),
        }


def outputs(variables, batch):
  """Logits that depend on the row alone; NaN for a row without tokens."""
  total = batch['tokens'].sum(1).astype(jnp.float32)[:, None, None]
  scale = total / jnp.where(total > 0, total, 0.0) * variables['scale']
  heads = jnp.arange(6, dtype=jnp.float32).reshape(1, HEADS, CLASSES)
  return {'logits': total * heads * scale, 'length': batch['length']}


def collect(dataset, scale=1.0):
  variables = {'scale': jnp.float32(scale)}
  return predictions.collect(dataset, variables, jax.jit(outputs))


@pytest.mark.parametrize(('rows', 'batch_size'), [(11, 4), (8, 4), (5, 16)])
def test_rows_come_back_in_the_order_of_the_records(rows, batch_size):
  dataset = Buckets(rows, batch_size)
  result = collect(dataset)
  total = np.array([tokens.sum() for tokens in dataset.tokens])
  expected = (total[:, None] * np.arange(6)).reshape(rows, HEADS, CLASSES)
  np.testing.assert_allclose(result.pop('logits'), expected, rtol=1e-6)
  np.testing.assert_equal(
    result,
    dict(index=np.arange(rows), label=dataset.label, length=dataset.length),
  )


def test_padding_with_nan_is_dropped_but_nan_in_a_row_is_an_error():
  # The last batch of 5 rows is padded with rows whose logits are NaN.
  assert np.isfinite(collect(Buckets(5))['logits']).all()
  with pytest.raises(FloatingPointError, match='logits: expected finite'):
    collect(Buckets(5), scale=float('nan'))


def test_an_empty_split_is_an_error():
  with pytest.raises(InvalidDataError, match='no example'):
    collect(Buckets(0))


def test_confidence_rounds_as_it_does_when_serving():
  # A margin of 17 nats is a probability of 1 in float32, not in float64.
  logits = np.array([[[17.0, 0.0]], [[0.0, 0.0]]])
  for dtype, head in ((np.float32, 0), (np.float64, 1)):
    assert Confidence(1.0).first(logits.astype(dtype)) == [head]
  # A threshold that float32 cannot hold is met by its nearest number.
  tenth = np.log(np.array([[[0.9, 0.1]], [[0.5, 0.5]]], np.float32))
  assert Confidence(0.9).first(tenth) == [0]


def test_hidden_labels_are_refused():
  predictions.check_labels(np.array([0, 2, 1]), 2, 'dev')
  with pytest.raises(InvalidDataError, match=r'test: expected labels .*-1'):
    predictions.check_labels(np.array([0, -1, -1]), 2, 'test')
  with pytest.raises(InvalidDataError, match='got 3 '):
    predictions.check_labels(np.array([3]), 2, 'dev')


def test_layers_ascend():
  for legal in ((), (4,), (2, 4, 12)):
    assert accepts(heads.Layers, legal)
  for illegal in ((4, 2), (0, 1), (2, 2), 4, ('4',), (1.0,)):
    assert not accepts(heads.Layers, illegal)
