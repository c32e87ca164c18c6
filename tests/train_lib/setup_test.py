"""Compiled steps by the shapes of their batches."""

import jax
import numpy as np

from dataset_lib.source import DatasetInfo
from train_lib import sharding
from train_lib.setup import Setup
from train_lib.stages import Stage

STAGE = Stage('stage1', 0, 10, {}, '.*', {})
INFO = DatasetInfo('tokens', (32,), 'int32', 2, (), 100, length_buckets=(8, 32))


class Data:
  info = INFO


class CountingSetup(Setup):
  """Compiles nothing, and says what it would have compiled."""

  def __init__(self):
    self.mesh = sharding.make_mesh({'data': 2})
    self.dataset = Data()
    self.compiled = {}

  def _compile(self, stage, frozen, batch):
    return stage.name, {name: leaf.shape for name, leaf in batch.items()}


def batch(length, rows=4):
  return {
    'tokens': np.zeros((rows, length), np.int32),
    'token_types': np.zeros((rows, length), np.int32),
    'length': np.ones(rows, np.int32),
    'mask': np.ones(rows, np.float32),
  }


def test_a_step_is_compiled_once_for_each_shape():
  one = CountingSetup()
  first = one.train_step(STAGE, {}, batch(8))
  assert first[1]['tokens'] == (4, 8)
  assert one.train_step(STAGE, {}, batch(8)) is first
  other = one.train_step(STAGE, {}, batch(32))
  assert other[1]['tokens'] == (4, 32)
  assert one.train_step(STAGE, {}, batch(8)) is first
  assert len(one.compiled) == 2


def test_a_step_is_compiled_once_for_each_static_part():
  one = CountingSetup()
  same = Stage('stage2', 10, 20, {}, '.*', {})
  head = Stage('stage3', 20, 30, {}, '^head/', {})
  first = one.train_step(STAGE, {}, batch(8))
  assert one.train_step(same, {}, batch(8)) is first
  assert one.train_step(head, {}, batch(8))[0] == 'stage3'


def test_another_dtype_is_another_step():
  one, wide = CountingSetup(), batch(8)
  wide['length'] = wide['length'].astype(np.float32)
  one.train_step(STAGE, {}, batch(8))
  one.train_step(STAGE, {}, wide)
  assert len(one.compiled) == 2


def test_the_longest_batch_has_the_shape_of_the_input():
  one = CountingSetup()
  short = sharding.put_batch(batch(8), one.mesh)
  longest = one.longest(short)
  assert {name: leaf.shape for name, leaf in longest.items()} == {
    'tokens': (4, 32),
    'token_types': (4, 32),
    'length': (4,),
    'mask': (4,),
  }
  assert isinstance(longest['tokens'], jax.ShapeDtypeStruct)
  assert longest['tokens'].sharding == short['tokens'].sharding
  full = sharding.put_batch(batch(32), one.mesh)
  assert one.longest(full) is full
