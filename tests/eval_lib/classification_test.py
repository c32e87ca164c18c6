"""One pass over a split against NumPy; padding and devices do not matter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataset_lib import builder
from eval_lib import evaluator
from eval_lib.metrics import Average, Maximum, Union, Variance

DIGITS = dict(name='digits', image_size=8)


def measure(variables, batch):
  """A linear classifier of the pixels, with a length that is made up."""
  pixels = batch['image'].astype(jnp.float32) / 255.0
  logits = pixels[..., 0].reshape(-1, 64) @ variables['kernel']
  correct = (logits.argmax(-1) == batch['label']).astype(jnp.float32)
  length = pixels.sum((1, 2, 3))
  flags = jax.nn.one_hot(batch['label'], 20) > 0
  mask = batch['mask']
  return {
    'accuracy': Average.from_values(correct, mask),
    'tape_length_variance': Variance.from_values(length, mask),
    'tape_length_max': Maximum.from_values(length, mask),
    'bank_share': Union.from_values(flags, mask),
  }


def variables():
  kernel = np.random.default_rng(0).normal(size=(64, 10))
  return {'kernel': jnp.asarray(kernel, jnp.float32)}


def run(batch_size, devices=1):
  mesh = jax.make_mesh(
    (devices,),
    ('data',),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:devices],
  )
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  context = evaluator.EvalContext(
    measure=jax.jit(measure),
    features=lambda variables, batch: None,
    put=lambda batch: jax.device_put(batch, rows),
    seed=0,
    batch_size=batch_size,
    dataset=DIGITS,
    workdir='',
  )
  entry = dict(type='classification', split='test', every_steps=7)
  built, every_steps = evaluator.build('test', entry, context)
  assert every_steps == 7
  result = built.run(variables())
  assert built.run(variables()) == result  # a second pass is a whole pass
  return result


def by_numpy():
  source = builder.build_source(DIGITS, 'test')
  records = [source.record(i) for i in range(len(source))]
  images = np.stack([r['image'] for r in records]).astype(np.float64) / 255
  labels = np.array([r['label'] for r in records])
  kernel = np.asarray(variables()['kernel'], np.float64)
  logits = images[..., 0].reshape(len(images), -1) @ kernel
  lengths = images.sum((1, 2, 3))
  return {
    'accuracy': np.mean(logits.argmax(-1) == labels),
    'tape_length_variance': lengths.var(),
    'tape_length_max': lengths.max(),
    'bank_share': len(set(labels)) / 20,
  }


@pytest.mark.parametrize(
  ('batch_size', 'devices'), [(359, 1), (64, 1), (7, 1), (64, 8), (512, 8)]
)
def test_equals_numpy_for_any_batch_size_and_device_count(batch_size, devices):
  assert run(batch_size, devices) == pytest.approx(by_numpy(), rel=1e-5)
