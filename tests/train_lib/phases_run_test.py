"""Whole runs: frozen phases, knobs, averages, bfloat16, warm start, traces."""

import json
import sys

import numpy as np
import pytest

from tests.train_lib import build_test
from train_lib import checkpoint_io as form
from train_lib import config_schema, trainer
from train_lib.task import Task

pytestmark = pytest.mark.nightly

STEPS = 2  # of each phase


def train(workdir, phases, *overrides):
  config = build_test.load(
    'mesh.data=1', 'log_every=1',
    'tensorboard=false', 'optimizer.warmup_steps=0', *overrides,
  )  # fmt: skip
  config = config.to_dict() | {'phases': phases, 'evals': {}}
  trainer.train(config_schema.validate(config), str(workdir))
  text = (workdir / 'metrics.jsonl').read_text()
  return [json.loads(line) for line in text.splitlines()]


def params(workdir, step, average=False):
  saved = form.find(workdir, step)
  return form.flatten(saved.params() if average else saved.read('params/'))


def changed(before, after):
  """Returns the names of the arrays that differ."""
  return {k for k in before if not np.array_equal(before[k], after[k])}


def save_asset(task, directory):
  with (directory / 'asset').open('a') as file:
    file.write(type(task).__name__)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run of two phases, the second of the head alone; (workdir, rows)."""
  workdir = tmp_path_factory.mktemp('runs') / 'staged'
  knobs = {'tape_weight': ('linear', 0, 9)}
  with pytest.MonkeyPatch.context() as patch:
    # The profiler need not look for TensorFlow here.
    patch.setitem(sys.modules, 'tensorflow', None)
    patch.setattr(Task, 'save_assets', save_asset)
    second = dict(steps=STEPS, trainable='^head/', knobs=knobs)
    rows = train(
      workdir, (dict(steps=STEPS), second), 'dtype=bfloat16',
      'ema_decay=0.5', 'checkpoint.every_steps=1', 'checkpoint.keep=10',
      'profile.start_step=1', 'profile.steps=1',
    )  # fmt: skip
  return workdir, rows


def test_the_second_phase_changes_its_own_parameters_only(run):
  workdir, _ = run
  before, after = params(workdir, STEPS), params(workdir, 2 * STEPS)
  assert changed(before, after) == {'head/kernel', 'head/bias'}
  first = params(workdir, 1)
  assert 'encoder/block_0/mlp/out/kernel' in changed(first, before)


def test_the_knob_follows_its_schedule(run):
  # The loss is the cross-entropy + the knob x the tape loss.
  weights = [
    (row['train/loss'] - row['train/cross_entropy']) / row['train/tape_loss']
    for row in run[1][STEPS:]
  ]
  np.testing.assert_allclose(weights, [0.0, 9.0], rtol=1e-3, atol=1e-3)


def test_bfloat16_trains_float32_parameters_and_stays_finite(run):
  workdir, rows = run
  assert [row['step'] for row in rows] == list(range(1, 2 * STEPS + 1))
  assert all(np.isfinite(row['train/loss']) for row in rows)
  leaves = params(workdir, 2 * STEPS).values()
  assert {leaf.dtype for leaf in leaves} == {np.dtype('float32')}


def test_assets_are_saved_once_and_a_trace(run):
  assert (run[0] / 'asset').read_text() == 'TapeClassification'
  assert list((run[0] / 'profile').rglob('*.xplane.pb'))


def test_a_warm_start_begins_with_the_other_average(run, tmp_path):
  phases = (dict(steps=1, trainable='^head/bias$'),)
  train(tmp_path, phases, f'warm_start.workdir={run[0]}', 'seed=7')
  source, started = params(run[0], None, average=True), params(tmp_path, 1)
  assert started.keys() == source.keys()
  assert changed(source, started) == {'head/bias'}
