"""Recorded outputs of a split: order, padding, lengths that differ, errors."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import InvalidDataError
from dataset_lib import builder
from eval_lib import predictions
from halting.row_rules import Confidence

DATA = dict(
  name='tests.fakes:FakeText', max_length=16, length_buckets=(6, 10, 16)
)


def dataset(rows, batch_size=4):
  return builder.build(
    DATA | dict(test_examples=rows), split='test', train=False, seed=0,
    batch_size=batch_size, host_index=0, host_count=1,
  )  # fmt: skip


def outputs(variables, batch):
  """Logits that depend on the row alone; NaN for a row without tokens."""
  total = batch['tokens'].sum(1).astype(jnp.float32)[:, None, None]
  scale = total / jnp.where(total > 0, total, 0.0) * variables['scale']
  heads = jnp.arange(6, dtype=jnp.float32).reshape(1, 2, 3)
  return {'logits': total * heads * scale, 'length': batch['length']}


def collect(data, scale=1.0):
  variables = {'scale': jnp.float32(scale)}
  return predictions.collect(data, variables, jax.jit(outputs))


@pytest.mark.parametrize(('rows', 'batch_size'), [(11, 4), (8, 4), (5, 16)])
def test_rows_come_back_in_the_order_of_the_records(rows, batch_size):
  data = dataset(rows, batch_size)
  records = data.source.records(np.arange(rows))
  result = collect(data)
  total = records['tokens'].sum(1)
  expected = (total[:, None] * np.arange(6)).reshape(rows, 2, 3)
  np.testing.assert_allclose(result.pop('logits'), expected, rtol=1e-6)
  columns = {name: records[name] for name in ('label', 'length')}
  np.testing.assert_equal(result, columns | {'index': np.arange(rows)})
  if batch_size < rows:  # batches of other lengths, in another order
    batches = [*data.batches()]
    order = np.concatenate([batch['index'] for batch in batches])
    assert len({batch['tokens'].shape for batch in batches}) > 1
    assert (np.diff(order[order >= 0]) < 0).any()


def test_padding_with_nan_is_dropped_but_nan_in_a_row_is_an_error():
  # The last batch of 5 rows is padded with rows whose logits are NaN.
  assert np.isfinite(collect(dataset(5))['logits']).all()
  with pytest.raises(FloatingPointError, match='logits: expected finite'):
    collect(dataset(5), scale=float('nan'))


def test_an_empty_split_is_an_error():
  with pytest.raises(InvalidDataError, match='no example'):
    collect(types.SimpleNamespace(batches=list))


def test_confidence_rounds_as_it_does_when_serving():
  # A margin of 17 nats is a probability of 1 in float32, not in float64.
  logits = np.array([[[17.0, 0.0]], [[0.0, 0.0]]])
  for dtype, head in ((np.float32, 0), (np.float64, 1)):
    assert Confidence(1.0).first(logits.astype(dtype)) == [head]
  # A threshold that float32 cannot hold is met by its nearest number.
  tenth = np.log(np.array([[[0.9, 0.1]], [[0.5, 0.5]]], np.float32))
  assert Confidence(0.9).first(tenth) == [0]
