"""Losses and metrics of a tape, by hand, with padding rows."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from dataset_lib.source import DatasetInfo
from launch import command_line
from tests import losses
from tests.adatape import serving_test as tapes
from tests.train_lib import mixup_test
from train_lib.task import build_task

IMAGE = (32, 32, 3)
MASK = np.array([1, 1, 0, 1, 0, 1], np.float32)
LABEL = np.array([0, 2, 1, 1, 0, 2], np.int32)
REAL = MASK > 0
WEIGHT = 0.3
NIGHTLY = pytest.param('input', marks=pytest.mark.nightly)


@pytest.fixture(scope='module', params=['learnable', NIGHTLY])
def case(request):
  """(task, params, batch, logits, tape), all arrays on the host."""
  model = tapes.IMAGE | dict(
    bank=request.param, bank_size=64, bank_patch_size=2
  )
  task, variables = tapes.build(model, tapes.DATA['image'])
  task.config['loss']['tape_weight'] = WEIGHT
  image = np.stack(tapes.items_of(task, len(MASK)))
  batch = {'image': image, 'label': LABEL, 'mask': MASK}
  batch = {name: jnp.asarray(value) for name, value in batch.items()}
  params = variables['params']
  logits, out = jax.device_get(jax.jit(task.apply)(params, {}, batch))
  return task, params, batch, logits, out['tape']


@pytest.mark.parametrize('knobs', [{}, {'tape_weight': 2.0}])
def test_loss_is_cross_entropy_plus_lambda_times_tape_loss(case, knobs):
  task, params, batch, logits, tape = case
  weight, tapes = knobs.get('tape_weight', WEIGHT), tape['loss'][REAL]
  entropy = -log_softmax(np.float64(logits), -1)[REAL, LABEL[REAL]]
  want = entropy.mean() + weight * tapes.mean()
  # The padding would change it.
  assert abs(tape['loss'].mean() - tapes.mean()) > 1e-3
  loss, _ = losses.of(task)(params, batch, knobs)
  assert loss == pytest.approx(want, abs=1e-5)


@pytest.mark.slow
def test_mixup_is_of_the_cross_entropy_and_the_tape(case):
  task, params, batch, *_ = case
  apply, loss = task.apply, dict(label_smoothing=0.1, mixup=0.0)
  with (
    mock.patch.dict(task.config['loss'], loss),
    # The noise of a query in training would be another one in the loop.
    mock.patch.object(task, 'apply', lambda p, s, batch, _: apply(p, s, batch)),
  ):
    mixup_test.assert_mixes(task, params, batch)


@pytest.mark.parametrize(
  ('model', 'counted'),
  [('uvit', 'depth'), ('avit', 'steps'), ('ponder', 'steps'), ('vit', '')],
)
def test_flops_of_a_row_are_those_of_its_depth(model, counted):
  config = command_line.load_config(
    f'configs/images.py:tfds=cifar10,size=32,model={model}', []
  )
  task = build_task(config, DatasetInfo('image', IMAGE, 'uint8', 10, (), 0))
  halts = {'depth': jnp.array([1, 2]), 'steps': jnp.array([0.5, 1.75])}
  flops = task.row_flops({'ponder': halts} if counted else {})
  wanted = [task.flops()]
  if counted:
    wanted = [task.model.flops(IMAGE, n) for n in halts[counted].tolist()]
    assert wanted[0] < wanted[1] < task.flops()
  np.testing.assert_allclose(flops, wanted, rtol=1e-6)
  logits, out = jnp.eye(2), {'ponder': halts} if counted else {}
  task.apply = lambda *given: (logits, out)
  rows = task.outputs({}, {}, {'mask': jnp.ones(2)})
  np.testing.assert_array_equal(rows.pop('logits'), logits[:, None])
  np.testing.assert_allclose(rows.pop('flops'), [*wanted, *wanted][:2])
  assert rows == (halts if counted else {})


def test_bank_share_counts_the_read_tokens_of_real_rows(case):
  task, params, batch, _, tape = case
  metrics = jax.jit(task.evaluate)(params, {}, batch)
  read = {
    int(index)
    for row in np.flatnonzero(REAL)
    for index in tape['indices'][row, : tape['length'][row]].ravel()
  }
  assert metrics['bank_share'].compute() == len(read) / 64
  assert 0 < len(read) < 64
